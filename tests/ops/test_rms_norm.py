"""RMSNorm, alone and behind the residual addition: what its gate's cases do not see."""

import pytest
import torch

from tests.ops.on_rows import (
    DEVICE,
    assert_within_budget,
    differentiated,
    drawn,
)
from tnp.dispatch import selection
from tnp.dispatch.devices import named
from tnp.dispatch.spec import Call
from tnp.ops._shared.norms import COLUMNS
from tnp.ops.rms_norm import (
    ADD_RMS_NORM,
    RMS_NORM,
    add_rms_norm,
    rms_norm,
    triton_rms_norm,
)


def test_several_stripes_and_blocks_of_a_wide_row(monkeypatch):
    monkeypatch.setattr(triton_rms_norm, "BLOCK", 256)
    inputs = drawn(ADD_RMS_NORM, 5, 600, "bfloat16")
    wide = ("columns", COLUMNS[0])
    results = differentiated(ADD_RMS_NORM, "fused", inputs, forced={"add_rms_norm.backward": wide})
    assert_within_budget(ADD_RMS_NORM, results, inputs)


@pytest.mark.parametrize("width, kernel", [(8192, "rows"), (8193, "columns"), (16_384, "columns")])
def test_rows_wider_than_a_backward_program_holds(width, kernel):
    call = Call(RMS_NORM.problem("bfloat16", rows=9, width=width), named("H200"), ("x",))
    backward = RMS_NORM.implementations[-1].backward
    assert selection.choose_kernel(backward, RMS_NORM, call)[0].name == kernel


def test_the_rounded_sum_is_what_is_normalized():
    inputs = drawn(ADD_RMS_NORM, 40, 64, "bfloat16")
    x, update, weight = inputs.values()
    total, normalized = add_rms_norm(x, update, weight, implementation="fused")
    assert torch.equal(total, x + update)
    assert torch.equal(normalized, rms_norm(total, weight, implementation="fused"))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("uses", [(0,), (1,), (0, 1)])
def test_gradients_of_what_is_used(uses, compiled):
    """A gradient of the sum alone is handed on: nothing is launched for it."""
    compute = torch.compile(add_rms_norm, backend="aot_eager") if compiled else add_rms_norm
    inputs = drawn(ADD_RMS_NORM, 11, 48)
    into = [torch.randn(11, 48, device=DEVICE) for _ in uses]
    results = []
    for name, function in (("fused", compute), ("torch", add_rms_norm)):
        leaves = [x.detach().clone().requires_grad_() for x in inputs.values()]
        outputs = function(*leaves, implementation=name)
        used = [outputs[at] for at in uses]
        results.append(torch.autograd.grad(used, leaves, into, allow_unused=True))
    for ours, own in zip(*results, strict=True):
        if own is None:
            assert ours is None or not ours.any()
        else:
            torch.testing.assert_close(ours, own, atol=1e-5, rtol=1e-5)
    if uses == (0,) and not compiled:
        assert results[0][0] is into[0]


@pytest.mark.parametrize("n_dims", [1, 2, 4])
def test_any_number_of_dimensions(n_dims):
    weight = torch.randn(40, device=DEVICE)
    x = torch.randn((2, 3, 5, 40)[-n_dims:], device=DEVICE, requires_grad=True)
    out, own = (rms_norm(x, weight, implementation=name) for name in ("fused", "torch"))
    torch.testing.assert_close(out, own)
    gradients = (torch.autograd.grad(y.square().sum(), x)[0] for y in (out, own))
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def test_a_number_that_is_no_float_is_one():
    x, weight = drawn(RMS_NORM, 3, 8).values()
    whole = rms_norm(x, weight, eps=1, implementation="fused")
    assert torch.equal(whole, rms_norm(x, weight, eps=1.0, implementation="fused"))


def test_problems_of_models():
    neural_process = {"d_model": 512}, {
        "batch": 64, "n_context": 64, "n_target": 500, "dtype": "bfloat16",
    }  # fmt: skip
    problem = ADD_RMS_NORM.within(*neural_process)
    assert (problem["rows"], problem["width"], problem.dtype) == (36_096, 512, "bfloat16")
    run = {"batch": 8, "n_tokens": 2048, "dtype": "bfloat16"}
    assert RMS_NORM.within({"norm": "rms", "d_model": 4096}, run)["rows"] == 16_384
    assert RMS_NORM.within({"norm": "layer", "d_model": 768}, run) is None


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
