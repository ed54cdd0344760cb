"""RMSNorm, alone and behind the residual addition: the gate's cases, contracts, what it refuses."""

import pytest
import torch
import torch.nn.functional as F

from tnp.gates import rms_norm as gate
from tnp.gates.checks import error_ratio, max_abs_error
from tnp.gates.rms_norm import BUDGETS, Case
from tnp.ops import triton_rms_norm
from tnp.ops.rms_norm import (
    _add_rms_norm,
    _rms_norm,
    _rms_norm_backward,
    add_rms_norm,
    rms_norm,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BOTH = Case(2, 7, 48, torch.float32, start=2)


def ratios(case: Case, results: dict, inputs: dict) -> dict[str, float]:
    own, exact = gate.differentiated(case, inputs, "torch"), gate.reference(case, inputs)
    return {name: error_ratio(x, own[name], exact[name]) for name, x in results.items()}


# On both sides of a tile's rows at this width (forward 32 in 32 bits and 64 in 16, backward half as
# many), and more tiles than programs.
@pytest.mark.parametrize("n_rows", [1, 31, 33, 64, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ragged_rows(n_rows, dtype):
    case = Case(1, n_rows, 60, dtype)
    inputs = gate.draw(case, DEVICE)
    results = gate.differentiated(case, inputs, "fused")
    for name, ratio in ratios(case, results, inputs).items():
        assert ratio <= BUDGETS[name], name


@pytest.mark.parametrize("width", [1, 100])
def test_forward_of_odd_widths(width):
    case = Case(3, 13, width, torch.float32, start=3)
    inputs = gate.draw(case, DEVICE)
    x, update, weight = (inputs[name] for name in ("x", "update", "weight"))
    total, normalized = triton_rms_norm.forward(x, update, weight, gate.EPS)
    for name, ratio in ratios(case, {"sum": total, "normalized": normalized}, inputs).items():
        assert ratio <= BUDGETS[name], name


@pytest.mark.parametrize("width", [100, 1024])
def test_backward_of_odd_widths(width):
    case = Case(3, 13, width, torch.float32, start=3)
    inputs = gate.draw(case, DEVICE)
    exact = gate.reference(case, inputs)
    own = gate.differentiated(case, inputs, "torch")
    dx, dweight = triton_rms_norm.backward(
        inputs["dnormalized"], inputs["dsum"], own["sum"], inputs["weight"], gate.EPS
    )
    for name, x in (("dx", dx), ("dweight", dweight)):
        assert error_ratio(x, own[name], exact[name]) <= BUDGETS[name], name


def eps_too_large(case, inputs):
    return gate.differentiated(case, inputs, "fused", eps=1e-2)


def rows_of_another_view(case, inputs):
    x = F.pad(inputs["x"], (0, 0, 1, 0))[:, :-1]
    return gate.differentiated(case, inputs | {"x": x}, "fused")


def weight_missing(case, inputs):
    weight = torch.ones_like(inputs["weight"])
    return gate.differentiated(case, inputs | {"weight": weight}, "fused")


def residual_gradient_missing(case, inputs):
    dsum = torch.zeros_like(inputs["dsum"])
    return gate.differentiated(case, inputs | {"dsum": dsum}, "fused")


@pytest.mark.parametrize(
    "wrong, named",
    [
        (eps_too_large, ("normalized", "dx", "dweight")),
        (rows_of_another_view, ("sum", "normalized", "dx", "dweight")),
        (weight_missing, ("normalized", "dx")),
        (residual_gradient_missing, ("dx", "dupdate")),
    ],
)
def test_negative_controls_fail(wrong, named):
    inputs = gate.draw(BOTH, DEVICE)
    found = ratios(BOTH, wrong(BOTH, inputs), inputs)
    for name in named:
        assert found[name] > 5 * BUDGETS[name], name


def test_the_rounded_sum_is_what_is_normalized():
    inputs = gate.draw(Case(1, 40, 64), DEVICE)
    x, update, weight = (inputs[name] for name in ("x", "update", "weight"))
    total, normalized = add_rms_norm(x, update, weight, implementation="fused")
    assert torch.equal(total, x + update)
    assert torch.equal(normalized, rms_norm(total, weight, implementation="fused"))


def test_an_unused_output_costs_nothing(monkeypatch):
    """A gradient of the sum alone launches nothing; one of the norm alone reads no other."""
    launched, backward = [], triton_rms_norm.backward

    def counted(dnormalized, dsum, *rest):
        launched.append(dsum is not None)
        return backward(dnormalized, dsum, *rest)

    monkeypatch.setattr(triton_rms_norm, "backward", counted)
    inputs = gate.draw(BOTH, DEVICE)
    for uses in ("sum", "normalized", "sum, normalized"):
        gate.differentiated(Case(2, 7, 48, torch.float32, uses=uses), inputs, "fused")
    assert launched == [False, True]


@pytest.mark.parametrize("n_dims", [1, 2, 4])
def test_any_number_of_dimensions(n_dims):
    weight = torch.randn(40, device=DEVICE)
    x = torch.randn((2, 3, 5, 40)[-n_dims:], device=DEVICE, requires_grad=True)
    out, own = (rms_norm(x, weight, implementation=name) for name in ("fused", "torch"))
    torch.testing.assert_close(out, own)
    gradients = (torch.autograd.grad(y.square().sum(), x)[0] for y in (out, own))
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def test_strided_rows_of_both_and_expanded_gradients():
    x = torch.randn(5, 3, 48, device=DEVICE).transpose(0, 1).requires_grad_()
    update = torch.randn(1, 1, 48, device=DEVICE).expand(3, 5, 48).requires_grad_()
    weight = torch.randn(48, device=DEVICE, requires_grad=True)
    results = []
    for name in ("fused", "torch"):
        total, normalized = add_rms_norm(x, update, weight, implementation=name)
        loss = total.sum() + 2 * normalized.sum()
        results.append((total, normalized, *torch.autograd.grad(loss, (x, update, weight))))
    for ours, own in zip(*results, strict=True):
        torch.testing.assert_close(ours, own, atol=1e-4, rtol=1e-4)
    assert results[0][0].is_contiguous() and results[0][1].is_contiguous()


def test_no_rows():
    x = torch.zeros(2, 0, 48, device=DEVICE, requires_grad=True)
    weight = torch.ones(48, device=DEVICE, requires_grad=True)
    total, normalized = add_rms_norm(x, x, weight, implementation="fused")
    assert total.shape == normalized.shape == (2, 0, 48)
    (total.sum() + normalized.sum()).backward()
    assert x.grad.shape == x.shape and (weight.grad == 0).all()


def test_offsets_pass_32_bits():
    """Rows 2³⁰ elements apart: the third starts where a 32-bit offset turns negative."""
    stride = 2**30
    memory = torch.empty(2 * stride + 64, dtype=torch.bfloat16, device=DEVICE)
    far = memory.as_strided((1, 3, 64), (0, stride, 1)).normal_()
    weight = torch.ones(64, device=DEVICE)
    results = []
    for x in (far, far.contiguous()):
        x = x.detach().requires_grad_()
        out = rms_norm(x, weight, implementation="fused")
        results.append((out, *torch.autograd.grad(out.float().square().sum(), x)))
    assert all(map(torch.equal, *results))


def test_operators_keep_their_contracts():
    inputs = gate.draw(Case(2, 5, 48, start=1), DEVICE)
    x, update, weight = (inputs[name].requires_grad_() for name in ("x", "update", "weight"))
    torch.library.opcheck(_rms_norm, (x, weight, 1e-6))
    torch.library.opcheck(_add_rms_norm, (x, update, weight, 1e-6))
    x, update, weight = (y.detach() for y in (x, update, weight))
    for dsum in (None, inputs["dsum"]):
        torch.library.opcheck(_rms_norm_backward, (inputs["dnormalized"], dsum, x, weight, 1e-6))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("uses", ["", "sum", "normalized", "sum, normalized"])
def test_compiles_in_one_graph(backend, uses, monkeypatch):
    case = Case(2, 7, 48, torch.float32, start=2, uses=uses)
    inputs = gate.draw(case, DEVICE)
    eager = gate.differentiated(case, inputs, "fused")
    for function in (rms_norm, add_rms_norm):
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        monkeypatch.setattr(gate, function.__name__, compiled)
    results = gate.differentiated(case, inputs, "fused")
    for name, x in eager.items():
        assert max_abs_error(results[name], x) <= 1e-6, name


def test_float64_by_torch():
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rms_norm, (x, weight))
    assert torch.autograd.gradcheck(lambda x, w: add_rms_norm(x, 2 * x, w), (x, weight))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.zeros(2, 7)}, r"x is \(2, 7\) and weight \(8,\): they must be"),
        ({"weight": torch.zeros(8, 1)}, r"and weight \(8, 1\): they must be"),
        ({"x": torch.zeros(2, 8).double()}, "x is torch.float64: it must be one of"),
        ({"weight": torch.zeros(8).bfloat16()}, "weight is torch.bfloat16: it must be"),
        ({"x": torch.zeros(8, 2).T}, "x has strides .*: its last dimension must be contiguous"),
        ({"weight": torch.zeros(16)[::2]}, "weight has stride 2: it must be contiguous"),
        ({"x": torch.zeros(2, 1025), "weight": torch.zeros(1025)}, "D is 1025: 'fused' takes"),
        ({"x": torch.zeros(2, 0), "weight": torch.zeros(0)}, "with D at least 1"),
        ({"eps": 0.0}, "eps is 0.0: it must be positive and finite"),
        ({"implementation": "quick"}, "unknown implementation 'quick' of rms_norm"),
    ],
)
def test_refusals(change, message):
    arguments = {"x": torch.zeros(2, 8), "weight": torch.zeros(8), "implementation": "fused"}
    arguments |= change
    with pytest.raises(ValueError, match=message):
        rms_norm(arguments.pop("x"), arguments.pop("weight"), **arguments)


@pytest.mark.parametrize(
    "update, message",
    [
        (torch.zeros(2, 7, 8), r"update is torch.float32 \(2, 7, 8\) .*: they must be equal"),
        (torch.zeros(2, 8).half(), r"update is torch.float16 .*: they must be equal"),
        (torch.zeros(8, 2).T, "update has strides .*: its last dimension must be contiguous"),
    ],
)
def test_refused_updates(update, message):
    with pytest.raises(ValueError, match=message):
        add_rms_norm(torch.zeros(2, 8), update, torch.zeros(8), implementation="fused")
