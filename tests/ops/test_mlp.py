"""The feed-forward layer: every implementation against float64, autograd, what it refuses."""

from dataclasses import replace

import pytest
import torch

from tests.dtypes import DTYPES
from tests.ops.opaque import require_contracts
from tnp import choice, targets
from tnp.contract import Call
from tnp.gates import mlp as gate
from tnp.gates.checks import error_ratio, max_abs_error
from tnp.gates.mlp import BUDGETS, IMPLEMENTATIONS, Case, draw, floors, reference, run
from tnp.ops.mlp import OPERATOR, composed, mlp

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = Case(70, 32, 48, 42)
ours = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def ratios(outs, inputs, dy) -> dict[str, float]:
    """`error_ratio` by the result's name."""
    own, exact = run(inputs, dy, "torch"), reference(inputs, dy)
    allowed = floors(inputs, dy)
    results = zip(BUDGETS, outs, own, exact, strict=True)
    return {name: error_ratio(*tensors, allowed.get(name, 0.0)) for name, *tensors in results}


@ours
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "n_rows, d, d_ff", [(1, 16, 40), (63, 64, 130), (65, 32, 48), (129, 128, 33)]
)
def test_within_budgets(implementation, n_rows, d, d_ff, dtype):
    case = Case(n_rows, d, d_ff, d_ff, dtype)
    inputs, dy = draw(case, DEVICE)
    outs = run(inputs, dy, implementation)
    for name, ratio in ratios(outs, inputs, dy).items():
        assert ratio <= BUDGETS[name], name
    assert [t.dtype for t in outs] == [dtype, dtype, torch.float32, torch.float32]


@pytest.mark.parametrize("d", [8, 42, 100])
def test_fused_takes_every_width(d):
    case = Case(70, d, 50, 50)
    inputs, dy = draw(case, DEVICE)
    for name, ratio in ratios(run(inputs, dy, "fused"), inputs, dy).items():
        assert ratio <= BUDGETS[name], name


@pytest.mark.parametrize("n_rows", [63, 64])
def test_single_with_few_rows_and_many(n_rows):
    """The interpreter has one multiprocessor: 64 rows fill it."""
    case = Case(n_rows, 32, 48, 48)
    inputs, dy = draw(case, DEVICE)
    for name, ratio in ratios(run(inputs, dy, "single"), inputs, dy).items():
        assert ratio <= BUDGETS[name], name


@ours
@pytest.mark.parametrize("chunk_rows", [32, 128])
def test_more_rows_than_are_saved_are_computed_again_in_chunks(
    implementation, chunk_rows, monkeypatch
):
    monkeypatch.setattr(composed, "SAVED_ROWS", 16)
    monkeypatch.setattr(composed, "CHUNK_ROWS", chunk_rows)
    choice.refresh()  # plans do not notice edited constants
    inputs, dy = draw(SMALL, DEVICE)
    outs = run(inputs, dy, implementation)
    choice.refresh()
    for name, ratio in ratios(outs, inputs, dy).items():
        assert ratio <= BUDGETS[name], name


@ours
@pytest.mark.parametrize("wanted", [("x",), ("up",), ("down",), ("x", "down")])
def test_gradients_are_the_same_alone(implementation, wanted):
    inputs, dy = draw(SMALL, DEVICE)
    every = dict(zip(("x", "up", "down"), run(inputs, dy, implementation)[1:], strict=True))
    some = [x.detach() for x in inputs]
    leaves = [x.requires_grad_() for x, name in zip(some, every, strict=True) if name in wanted]
    y = mlp(*some, implementation=implementation)
    for name, gradient in zip(wanted, torch.autograd.grad(y, leaves, dy), strict=True):
        assert torch.equal(gradient, every[name]), name


def test_the_gate_is_green_and_knows_its_implementations():
    case = gate.CPU_CASES[0]
    inputs, dy = draw(case, DEVICE)
    exact = reference(inputs, dy)
    for name in IMPLEMENTATIONS:
        checks = list(gate._padding(case, inputs, dy, name, run(inputs, dy, name), exact))
        assert all(check.passed and check.implementation == name for check in checks)


def silu_missing(x, up, down):
    return x.float() @ up.T @ down.T


def padding_not_zero(x, up, down):
    garbage = [up.detach().clone(), down.detach().clone()]
    garbage[0][42:] += 1.0
    garbage[1][:, 42:] += 1.0
    return mlp(x, *(w.requires_grad_() for w in garbage), implementation="fused")


def last_row_dropped(x, up, down):
    return torch.cat([mlp(x[:-8], up, down, implementation="fused"), x[-8:] * 0.0])


@pytest.mark.parametrize("wrong", [silu_missing, padding_not_zero, last_row_dropped])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_negative_controls_fail(wrong, dtype):
    inputs, dy = draw(replace(SMALL, dtype=dtype), DEVICE)
    y = wrong(*inputs).to(dy.dtype)
    assert ratios((y,) + run(inputs, dy, "torch")[1:], inputs, dy)["y"] > 5 * BUDGETS["y"]


@ours
def test_views_are_read_in_place_and_copies_give_the_same(implementation):
    """Rows of a slice, a transposed matrix, and a sample's targets of [B, L, D]."""
    (x, up, down), _dy = draw(Case(2 * 70, 32, 48, 48), DEVICE)
    x = x.detach()
    views = [x.view(70, 64)[:, :32], x[:32].t()[:, :32], x.view(2, 70, 32)[:, 13:]]
    for view in views:
        assert not view.is_contiguous()
        expected = mlp(view.contiguous(), up, down, implementation=implementation)
        assert torch.equal(mlp(view, up, down, implementation=implementation), expected)


@ours
def test_an_expanded_output_gradient_and_weights_of_other_strides(implementation):
    (x, up, down), _dy = draw(SMALL, DEVICE)
    strided = [w.detach().t().contiguous().t().requires_grad_() for w in (up, down)]
    y = mlp(x, *strided, implementation=implementation)
    gradients = torch.autograd.grad(y.sum(), (x, *strided))
    expected = run([x, up, down], torch.ones_like(y), implementation)[1:]
    assert all(map(torch.equal, gradients, expected))


@pytest.mark.parametrize("implementation", ["torch", *IMPLEMENTATIONS])
def test_no_rows(implementation):
    _, up, down = draw(SMALL, DEVICE)[0]
    x = torch.zeros(2, 0, 32, device=DEVICE, requires_grad=True)
    y = mlp(x, up, down, implementation=implementation)
    assert y.shape == (2, 0, 32)
    gradients = torch.autograd.grad(y.sum(), (x, up, down))
    assert all((gradient == 0).all() for gradient in gradients)


@ours
def test_gradients_have_the_weights_dtype(implementation):
    (x, up, down), dy = draw(SMALL, DEVICE)
    up, down = (w.detach().to(torch.bfloat16).requires_grad_() for w in (up, down))
    _y, _dx, *gradients = run([x, up, down], dy, implementation)
    assert [g.dtype for g in gradients] == [torch.bfloat16] * 2


def served(target, wanted, dtype="bfloat16", **sizes) -> tuple[str, str]:
    """Kernels of both passes of `fused`, where no table says anything."""
    from tnp.plans import choose_kernel

    sizes = {"rows": 777, "d_model": 512, "d_ff": 1408} | sizes
    call = Call(OPERATOR.problem(dtype, **sizes), target, wanted)
    fused = next(one for one in OPERATOR.implementations if one.name == "fused")
    forward, _ = choose_kernel(fused.forward, OPERATOR, call)
    backward, _ = choose_kernel(fused.backward, OPERATOR, call, forward.saves)
    assert forward.saves == backward.saves
    return forward.name, backward.name


H100, A100, B200 = (targets.named(name) for name in ("H100", "A100", "B200"))
EVERY = ("x", "up", "down")


def test_which_kernel_serves():
    assert served(H100, EVERY) == ("hopper", "hopper")
    assert served(H100, EVERY, "float16", d_ff=1400) == ("hopper", "hopper")  # 1400 is padded
    assert served(H100, EVERY, rows=65_536) == ("hopper", "hopper")
    assert served(H100, EVERY, rows=65_537) == ("hopper_again", "hopper_again")
    assert served(H100, ()) == ("hopper_again", "hopper_again")
    others = ({"dtype": "float32"}, {"d_model": 256}, {"d_ff": 1365})
    for changes in others:
        assert served(H100, EVERY, **changes) == ("triton", "triton")
        assert served(H100, (), **changes)[0] == "triton_again"
    for target in (A100, B200):
        assert served(target, EVERY) == ("triton", "triton")
        assert served(target, EVERY, rows=70_000) == ("triton_again", "triton_again")


def test_inference_neither_writes_nor_keeps_hidden_rows():
    inputs, dy = draw(SMALL, DEVICE)
    with torch.no_grad():
        y = mlp(*inputs, implementation="fused")
    frozen = mlp(*(t.detach() for t in inputs), implementation="fused")
    trained = mlp(*inputs, implementation="fused")
    assert torch.equal(y, frozen) and torch.equal(y, trained)
    assert len(trained.grad_fn.saved_tensors) == 5 and y.grad_fn is None
    outputs, saved = composed.FORWARD_AGAIN.empty((), inputs)
    assert len(outputs) == 1 and saved == ()


@ours
@pytest.mark.parametrize("d_ff", [48, 42])
def test_operators_keep_their_contracts(implementation, d_ff):
    inputs, _dy = draw(Case(20, 32, d_ff, d_ff), DEVICE)
    require_contracts(OPERATOR, implementation, inputs)


@pytest.mark.parametrize("implementation", ["torch", *IMPLEMENTATIONS])
def test_compiles_in_one_graph(implementation):
    inputs, dy = draw(SMALL, DEVICE)
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    y = compiled(*inputs, implementation=implementation)
    gradients = torch.autograd.grad(y, inputs, dy)
    eager = run(inputs, dy, implementation)
    for a, b in zip((y, *gradients), eager, strict=True):
        assert a.stride() == b.stride()
        assert max_abs_error(a, b) <= 1e-2 * b.abs().max()


@pytest.mark.skipif(DEVICE.type == "cpu", reason="CUDA graphs need a CUDA device")
@ours
def test_captures_in_a_cuda_graph(implementation):
    inputs, dy = draw(SMALL, DEVICE)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        eager = run(inputs, dy, implementation)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = run(inputs, dy, implementation)
        for out in captured:
            out.fill_(float("nan"))
        graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(captured, eager, strict=True):
        assert max_abs_error(a, b) <= 1e-2 * b.abs().max()


def bad_inputs():
    x, up, down = torch.zeros(4, 32), torch.zeros(48, 32), torch.zeros(32, 48)
    yield r"they must be \[F, D\] and \[D, F\]", (x, up, down.t())
    yield "with D = 32 of up", (x[:, :16], up, down)
    yield "down is torch.int64: it must be a float dtype", (x, up, down.long())
    yield "up is on meta and x on cpu", (x, up.to("meta"), down)


@pytest.mark.parametrize("message, inputs", list(bad_inputs()), ids=lambda value: str(value)[:30])
@ours
def test_bad_input_is_one_sentence(implementation, message, inputs):
    with pytest.raises(ValueError, match=message):
        mlp(*inputs, implementation=implementation)


def test_what_each_implementation_refuses():
    x, up, down = torch.zeros(4, 48), torch.zeros(8, 48), torch.zeros(48, 8)
    with pytest.raises(RuntimeError, match="'single' cannot run here: D is 48: it takes a power"):
        mlp(x, up, down, implementation="single")
    with pytest.raises(RuntimeError, match="it takes bfloat16, float16, float32, not float64"):
        mlp(x.double(), up, down, implementation="fused")
    with pytest.raises(ValueError, match="unknown implementation 'fusd' of mlp"):
        mlp(x, up, down, implementation="fusd")
    with pytest.raises(ValueError, match="x is torch.int64: it must be a float dtype"):
        mlp(x.long(), up, down)
    assert mlp(x.double(), up, down).dtype == torch.float64
