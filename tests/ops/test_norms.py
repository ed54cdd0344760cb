"""Tests softmax and norms in sizes and with numbers that their gates do not have."""

from dataclasses import replace

import pytest
import torch

from tests.ops.problems import DEVICE, HERE, assert_within_budget, by, setting
from tnp.dispatch import selection
from tnp.dispatch.devices import named
from tnp.dispatch.spec import Call
from tnp.ops._shared.norms import COLUMNS
from tnp.ops.layer_norm import OPERATOR as LAYER_NORM
from tnp.ops.layer_norm import layer_norm, triton_layer_norm
from tnp.ops.projection import linear
from tnp.ops.rms_norm import ADD_RMS_NORM, RMS_NORM, add_rms_norm, rms_norm, triton_rms_norm
from tnp.ops.rms_norm_linear import rms_norm_linear
from tnp.ops.softmax import OPERATOR as SOFTMAX
from tnp.ops.softmax.triton_softmax import BlockConfig

INF = float("inf")
BLOCKS = {f"softmax.{name}": ("blocks", BlockConfig(64, 1)) for name in ("forward", "backward")}


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE)


@pytest.mark.parametrize("width, dtype", [(64, "bfloat16"), (65, "float32"), (300, "bfloat16")])
def test_several_blocks_of_a_row_of_softmax(width, dtype):
    of = setting(SOFTMAX, "triton", dtype, {"magnitude": 8.0}, rows=5, width=width)
    assert_within_budget(of, by(of, "triton", BLOCKS))


@pytest.mark.parametrize(
    "operator, code, draw",
    [(LAYER_NORM, triton_layer_norm, {"offset": 3.0}), (ADD_RMS_NORM, triton_rms_norm, {})],
    ids=["layer_norm", "add_rms_norm"],
)
def test_several_stripes_and_blocks_of_a_wide_row(operator, code, draw, monkeypatch):
    monkeypatch.setattr(code, "BLOCK", 256)
    own = operator.implementations[-1].name
    of = setting(operator, own, "bfloat16", draw, rows=5, width=600)
    wide = {f"{operator.name}.backward": ("columns", COLUMNS[0])}
    assert_within_budget(of, by(of, own, wide))


@pytest.mark.parametrize(
    "operator, target, width, kernel",
    [
        (SOFTMAX, HERE, 16_384, "rows"),
        (SOFTMAX, HERE, 16_385, "blocks"),
        (SOFTMAX, HERE, 128_256, "blocks"),
        (RMS_NORM, named("H200"), 8192, "rows"),
        (RMS_NORM, named("H200"), 8193, "columns"),
        (RMS_NORM, named("H200"), 16_384, "columns"),
    ],
)
def test_rows_wider_than_a_program_holds(operator, target, width, kernel):
    call = Call(operator.problem("bfloat16", rows=9, width=width), target, ("x",))
    backward = operator.implementations[-1].backward
    assert selection.choose_kernel(backward, operator, call)[0].name == kernel


@pytest.mark.parametrize("forced", [None, BLOCKS], ids=["rows", "blocks"])
def test_softmax_of_infinities_and_nan_equals_pytorchs(forced):
    """Rows masked first, middle and last; −∞ alone; one ∞; a NaN; far apart; all equal."""
    x = torch.randn(9, 130, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x[0, :70] = x[1, 30:100] = x[2, 60:] = x[3] = -INF
    x[4, 77], x[5, 66] = INF, float("nan")
    x[6, 5], x[6, 100], x[7] = 3e38, -3e38, -7.0
    of = replace(setting(SOFTMAX, "triton", rows=9, width=130), inputs={"x": x})
    ours, own = by(of, "triton", forced), by(of, "torch")
    torch.testing.assert_close(ours, own, equal_nan=True)
    assert ours["y"][3:6].isnan().all() and ours["y"][:3].isfinite().all()


def test_one_column_is_its_own_mean():
    x, weight, bias = normal(13, 1).requires_grad_(), normal(1), normal(1)
    y = layer_norm(x, weight, bias, implementation="triton")
    assert torch.equal(y, bias.expand(13, 1))
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(dx, torch.zeros_like(dx), atol=1e-4, rtol=0)


def test_the_rounded_sum_is_normalized():
    x, update = normal(2, 20, 48).bfloat16(), normal(2, 20, 48).bfloat16()
    gain, weight = normal(48), normal(24, 48)
    total, normalized = add_rms_norm(x, update, gain, implementation="fused")
    assert torch.equal(total, x + update)
    assert torch.equal(normalized, rms_norm(total, gain, implementation="fused"))
    assert torch.equal(rms_norm_linear(x, update, gain, weight, implementation="triton")[0], total)


@pytest.mark.parametrize("compiled, uses", [(False, (0,)), (True, (0,)), (True, (1,))])
def test_gradients_of_used_outputs(uses, compiled):
    """A gradient of the sum alone is handed on: nothing is launched for it."""
    compute = torch.compile(add_rms_norm, backend="aot_eager") if compiled else add_rms_norm
    inputs = normal(11, 48), normal(11, 48), normal(48)
    into = [normal(11, 48) for _ in uses]
    results = []
    for name, function in (("fused", compute), ("torch", add_rms_norm)):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        outputs = function(*leaves, implementation=name)
        used = [outputs[at] for at in uses]
        results.append(torch.autograd.grad(used, leaves, into, allow_unused=True))
    for ours, own in zip(*results, strict=True):
        if own is None:
            assert ours is None or not ours.any()
        else:
            torch.testing.assert_close(ours, own, atol=1e-5, rtol=1e-5)
    if not compiled:
        assert results[0][0] is into[0]


@pytest.mark.parametrize("n_dims", [1, 2, 4])
@pytest.mark.parametrize("function, weight", [(rms_norm, (16,)), (linear, (8, 16))])
def test_any_number_of_dimensions(function, weight, n_dims):
    x, weight = normal(*(2, 3, 5, 16)[-n_dims:]).requires_grad_(), normal(*weight)
    out, own = (function(x, weight, implementation=name) for name in ("fused", "torch"))
    torch.testing.assert_close(out, own)
    gradients = (torch.autograd.grad(y.square().sum(), x)[0] for y in (out, own))
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def test_a_whole_number_is_taken_for_a_float():
    x, weight = normal(3, 8), normal(8)
    whole = rms_norm(x, weight, eps=1, implementation="fused")
    assert torch.equal(whole, rms_norm(x, weight, eps=1.0, implementation="fused"))


@pytest.mark.parametrize("width", [512, 1024, 2048, 4096, 8192])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("gpu", ["A10G", "A100", "H200"])
def test_the_loads_ahead_fit_into_shared_memory(width, dtype, gpu):
    call = Call(RMS_NORM.problem(dtype, rows=10_000, width=width), named(gpu))
    configs = triton_rms_norm.BACKWARD.configs(call)
    assert configs
    for config in configs:
        tile = config.sizes(width, call.problem.itemsize)["ROWS"] * width * call.problem.itemsize
        assert 3 * tile * (config.num_stages - 1) <= call.target.shared_bytes
