"""The mixture heads: every implementation against float64, autograd, what it refuses."""

import pytest
import torch

from tests.dtypes import DTYPES
from tests.ops.opaque import require_contracts
from tnp import choice, targets
from tnp.contract import Call
from tnp.gates import mixture_heads as gate
from tnp.gates.checks import error_ratio, max_abs_error
from tnp.gates.mixture_heads import BUDGETS, Case, draw, floors, reference, run
from tnp.ops import mixture_heads as operator
from tnp.ops.mixture_heads import OPERATOR, mixture_heads, triton_heads
from tnp.plans import choose_kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = Case(70, 32, 48, 42, 3)
FLOAT32 = Case(70, 32, 48, 42, 3, dtype=torch.float32)


def ratios(outs, inputs, dout) -> dict[str, float]:
    """`error_ratio` by the result's name."""
    own, exact = run(inputs, dout, "torch"), reference(inputs, dout)
    allowed = floors(inputs, dout)
    results = zip(BUDGETS, outs, own, exact, strict=True)
    return {name: error_ratio(*tensors, allowed.get(name, 0.0)) for name, *tensors in results}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "n_rows, d, d_ff, n_heads, n_out",
    [(1, 16, 40, 4, 1), (63, 64, 130, 2, 3), (129, 32, 48, 3, 5), (65, 42, 33, 2, 16)],
)
def test_within_budgets(n_rows, d, d_ff, n_heads, n_out, dtype):
    case = Case(n_rows, d, d_ff, d_ff, n_heads, n_out, dtype)
    inputs, dout = draw(case, DEVICE)
    outs = run(inputs, dout, "fused")
    for name, ratio in ratios(outs, inputs, dout).items():
        assert ratio <= BUDGETS[name], name
    assert [t.dtype for t in outs] == [torch.float32, dtype, torch.float32, torch.float32]


@pytest.mark.parametrize("implementation", ["torch", "loop", "bmm", "grouped_mm"])
def test_pytorchs_forms_agree(implementation):
    """In float32, to rounding: `grouped_mm`, which takes bfloat16 on a GPU, to bfloat16's."""
    if implementation == "grouped_mm" and DEVICE.type == "cpu":
        pytest.skip(f"{implementation} does not run here")
    dtype = torch.bfloat16 if implementation == "grouped_mm" else torch.float32
    case = Case(70, 32, 48, 42, 3, dtype=dtype)
    inputs, dout = draw(case, DEVICE)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    outs, exact = run(inputs, dout, implementation), reference(inputs, dout)
    for out, expected in zip(outs, exact, strict=True):
        assert max_abs_error(out, expected) <= tolerance * expected.abs().max()
    assert outs[0].dtype == dtype


@pytest.mark.skipif(DEVICE.type == "cuda", reason="float32 is for the CPU alone")
def test_grouped_mm_multiplies_the_right_operands():
    """On the CPU PyTorch computes its forward pass, which no implementation offers there."""
    (x, up, down), _dout = draw(FLOAT32, DEVICE)
    with torch.no_grad():
        out = operator._grouped_mm(x.view(2, 35, 32), up, down)
        expected = mixture_heads(x.view(2, 35, 32), up, down)
    assert out.shape == (2, 35, 3, 3)
    assert max_abs_error(out, expected) <= 1e-5


def test_chunks_of_rows_add_up(monkeypatch):
    """Three chunks, the last one short, share one buffer."""
    inputs, dout = draw(Case(150, 32, 48, 42, 2), DEVICE)
    whole = run(inputs, dout, "fused")
    monkeypatch.setattr(triton_heads, "CHUNK_ROWS", 64)
    choice.refresh()  # plans do not notice edited constants
    chunked, again = (run(inputs, dout, "fused") for _ in range(2))
    choice.refresh()
    assert all(map(torch.equal, chunked, again))
    for a, b in zip(chunked, whole, strict=True):
        assert max_abs_error(a, b) <= 1e-5 * b.abs().max()


def test_chunks_are_whole_tiles():
    for configs in (triton_heads.FORWARD_CONFIGS, triton_heads.BACKWARD_CONFIGS):
        for config in configs.values():
            assert triton_heads.CHUNK_ROWS % config.block_m == 0


def test_padding_is_exact_and_has_no_gradient():
    inputs, dout = draw(SMALL, DEVICE)
    exact = gate.reference(inputs, dout)[0]
    checks = list(gate._ours(SMALL, inputs, dout, run(inputs, dout, "fused"), exact))
    assert len(checks) == 3 and all(check.passed for check in checks)


def silu_missing(x, up, down):
    return torch.einsum("td,kfd,kof->tko", x.float(), up, down)


def heads_swapped(x, up, down):
    return mixture_heads(x, up, down.flip(0), implementation="fused")


def outputs_shifted(x, up, down):
    return mixture_heads(x, up, down.roll(1, 1), implementation="fused")


@pytest.mark.parametrize("wrong", [silu_missing, heads_swapped, outputs_shifted])
@pytest.mark.parametrize("case", [SMALL, FLOAT32], ids=str)
def test_negative_controls_fail(wrong, case):
    inputs, dout = draw(case, DEVICE)
    outs = (wrong(*inputs), *run(inputs, dout, "torch")[1:])
    assert ratios(outs, inputs, dout)["out"] > 5 * BUDGETS["out"]


def test_views_are_read_in_place_and_copies_give_the_same():
    (x, up, down), _dout = draw(Case(140, 32, 48, 48, 3), DEVICE)
    x = x.detach()
    views = [x.view(70, 64)[:, :32], x[:32].t()[:, :32], x.view(2, 70, 32)[:, 13:]]
    for view in views:
        assert not view.is_contiguous()
        expected = mixture_heads(view.contiguous(), up, down, implementation="fused")
        out = mixture_heads(view, up, down, implementation="fused")
        assert torch.equal(out, expected) and out.shape == (*view.shape[:-1], 3, 3)


def test_an_expanded_output_gradient():
    inputs, dout = draw(SMALL, DEVICE)
    out = mixture_heads(*inputs, implementation="fused")
    gradients = torch.autograd.grad(out.sum(), inputs)
    expected = run(inputs, torch.ones_like(dout), "fused")[1:]
    assert all(map(torch.equal, gradients, expected))


@pytest.mark.parametrize("implementation", ["torch", "loop", "bmm", "fused"])
def test_no_rows(implementation):
    _, up, down = draw(SMALL, DEVICE)[0]
    x = torch.zeros(2, 0, 32, device=DEVICE, requires_grad=True)
    out = mixture_heads(x, up, down, implementation=implementation)
    assert out.shape == (2, 0, 3, 3)
    gradients = torch.autograd.grad(out.sum(), (x, up, down))
    assert all((gradient == 0).all() for gradient in gradients)


@pytest.mark.parametrize("wanted", [("x",), ("up",), ("down",)])
def test_gradients_are_the_same_alone(wanted):
    inputs, dout = draw(SMALL, DEVICE)
    every = dict(zip(("x", "up", "down"), run(inputs, dout, "fused")[1:], strict=True))
    some = [x.detach() for x in inputs]
    leaves = [x.requires_grad_() for x, name in zip(some, every, strict=True) if name in wanted]
    out = mixture_heads(*some, implementation="fused")
    for name, gradient in zip(wanted, torch.autograd.grad(out, leaves, dout), strict=True):
        assert torch.equal(gradient, every[name]), name


def test_which_kernel_serves():
    def served(gpu: str, dtype: str = "bfloat16", **changes: int) -> set[str]:
        sizes = {"rows": 777, "d_model": 512, "d_ff": 1408, "n_components": 10, "n_outputs": 3}
        problem = OPERATOR.problem(dtype, **sizes | changes)
        call = Call(problem, targets.named(gpu), ("x", "up", "down"))
        fused = OPERATOR.implementations[-1]
        both = (fused.forward, fused.backward)
        return {choose_kernel(operation, OPERATOR, call)[0].name for operation in both}

    assert served("H100") == served("H200", "float16", d_ff=1400) == {"hopper"}
    for changes in ({"d_model": 256}, {"d_ff": 1365}, {"n_outputs": 5}):
        assert served("H100", **changes) == {"triton"}
    assert served("H100", "float32") == served("A100") == served("B200") == {"triton"}


@pytest.mark.parametrize("d_ff", [48, 42])
def test_operators_keep_their_contracts(d_ff):
    inputs, _dout = draw(Case(20, 32, d_ff, d_ff, 2), DEVICE)
    require_contracts(OPERATOR, "fused", inputs)


@pytest.mark.parametrize("implementation", ["torch", "loop", "bmm", "fused"])
def test_compiles_in_one_graph(implementation):
    inputs, dout = draw(SMALL, DEVICE)
    compiled = torch.compile(mixture_heads, fullgraph=True, backend="aot_eager")
    out = compiled(*inputs, implementation=implementation)
    gradients = torch.autograd.grad(out, inputs, dout.to(out.dtype))
    eager = run(inputs, dout, implementation)
    for a, b in zip((out, *gradients), eager, strict=True):
        assert a.stride() == b.stride()
        assert max_abs_error(a, b) <= 1e-2 * b.abs().max()


@pytest.mark.skipif(DEVICE.type == "cpu", reason="CUDA graphs need a CUDA device")
def test_captures_in_a_cuda_graph():
    inputs, dout = draw(SMALL, DEVICE)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        eager = run(inputs, dout, "fused")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = run(inputs, dout, "fused")
        for out in captured:
            out.fill_(float("nan"))
        graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, captured, eager))


def bad_inputs():
    x, up, down = torch.zeros(4, 32), torch.zeros(2, 48, 32), torch.zeros(2, 3, 48)
    yield r"they must be \[K, F, D\] and \[K, O, F\]", (x, up, down[:1])
    yield r"they must be \[K, F, D\] and \[K, O, F\]", (x, up[0], down)
    yield "with D = 32 of up", (x[:, :16], up, down)
    yield "down is torch.int64: it must be a float dtype", (x, up, down.long())
    yield "up is on meta and x on cpu", (x, up.to("meta"), down)
    yield "x is torch.int64: it must be a float dtype", (x.long(), up, down)


@pytest.mark.parametrize("message, inputs", list(bad_inputs()), ids=lambda value: str(value)[:30])
def test_bad_input_is_one_sentence(message, inputs):
    with pytest.raises(ValueError, match=message):
        mixture_heads(*inputs, implementation="fused")


def test_what_each_implementation_refuses():
    x, up, down = torch.zeros(4, 32), torch.zeros(2, 42, 32), torch.zeros(2, 3, 42)
    with pytest.raises(RuntimeError, match="F is 42 and D 32: it takes multiples of 8"):
        mixture_heads(x.bfloat16(), up, down, implementation="grouped_mm")
    with pytest.raises(RuntimeError, match="O is 17: it takes at most 16 outputs a head"):
        mixture_heads(x, up, torch.zeros(2, 17, 42), implementation="fused")
    with pytest.raises(RuntimeError, match="it takes bfloat16, float16, float32, not float64"):
        mixture_heads(x.double(), up, down, implementation="fused")
    with pytest.raises(ValueError, match="unknown implementation 'lop' of mixture_heads"):
        mixture_heads(x, up, down, implementation="lop")
    assert mixture_heads(x.double(), up, down, implementation="bmm").dtype == torch.float64
