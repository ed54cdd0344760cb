"""The feed-forward layer: every implementation against float64, autograd, what it refuses."""

from dataclasses import replace

import pytest
import torch

from tests.dtypes import DTYPES
from tnp.gates import mlp as gate
from tnp.gates.checks import error_ratio, max_abs_error
from tnp.gates.mlp import BUDGETS, IMPLEMENTATIONS, Case, draw, floors, reference, run
from tnp.ops import mlp as operator
from tnp.ops.mlp import mlp, single, triton_mlp

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


@pytest.mark.parametrize("n_rows", [69, 70])
def test_single_with_few_rows_and_many(n_rows, monkeypatch):
    monkeypatch.setattr(single, "MANY_ROWS", 70)
    case = Case(n_rows, 32, 48, 48)
    inputs, dy = draw(case, DEVICE)
    for name, ratio in ratios(run(inputs, dy, "single"), inputs, dy).items():
        assert ratio <= BUDGETS[name], name


@ours
def test_more_rows_than_are_saved_are_computed_again_in_chunks(implementation, monkeypatch):
    monkeypatch.setattr(triton_mlp, "SAVED_ROWS", 16)
    monkeypatch.setattr(triton_mlp, "CHUNK_ROWS", 32)
    inputs, dy = draw(SMALL, DEVICE)
    with monkeypatch.context() as patch:
        patch.delattr(triton_mlp, "forward_saving")
        outs = run(inputs, dy, implementation)
    for name, ratio in ratios(outs, inputs, dy).items():
        assert ratio <= BUDGETS[name], name


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


def test_inference_neither_writes_nor_keeps_hidden_rows(monkeypatch):
    wanted, matmul_silu = [], operator.triton_mlp.matmul_silu

    def noted(x, w, save):
        wanted.append(save)
        return matmul_silu(x, w, save)

    monkeypatch.setattr(operator.triton_mlp, "matmul_silu", noted)
    inputs, dy = draw(SMALL, DEVICE)
    with torch.no_grad():
        y = mlp(*inputs, implementation="fused")
    frozen = mlp(*(t.detach() for t in inputs), implementation="fused")
    assert torch.equal(y, frozen) and torch.equal(y, run(inputs, dy, "fused")[0])
    assert wanted == [False, False, True]


@pytest.mark.parametrize("d_ff", [48, 42])
def test_operators_keep_their_contracts(d_ff):
    (x, up, down), dy = draw(Case(20, 32, d_ff, d_ff), DEVICE)
    torch.library.opcheck(operator._mlp, (x, up, down, True))
    torch.library.opcheck(operator._mlp_single, (x, up, down))
    plain = [t.detach() for t in (x, up, down)]
    torch.library.opcheck(operator._mlp, (*plain, False))
    _y, h, z = operator._mlp(*plain, True)
    torch.library.opcheck(operator._mlp_backward, (dy, *plain, h, z))
    torch.library.opcheck(operator._mlp_single_backward, (dy, *plain))


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
    yield "x is torch.float64: it must be one of", (x.double(), up, down)


@pytest.mark.parametrize("message, inputs", list(bad_inputs()), ids=lambda value: str(value)[:30])
@ours
def test_bad_input_is_one_sentence(implementation, message, inputs):
    with pytest.raises(ValueError, match=message):
        mlp(*inputs, implementation=implementation)


def test_what_each_implementation_refuses():
    x, up, down = torch.zeros(4, 48), torch.zeros(8, 48), torch.zeros(48, 8)
    with pytest.raises(ValueError, match="D is 48: implementation 'single' takes a power of two"):
        mlp(x, up, down, implementation="single")
    with pytest.raises(ValueError, match="unknown implementation 'fusd' of mlp"):
        mlp(x, up, down, implementation="fusd")
    with pytest.raises(ValueError, match="x is torch.int64: it must be a float dtype"):
        mlp(x.long(), up, down)
    assert mlp(x.double(), up, down).dtype == torch.float64
