"""RMSNorm, alone and behind the residual addition: what its gate's cases do not see."""

import pytest
import torch

from tests.ops.on_rows import (
    DEVICE,
    assert_within_budget,
    differentiated,
    drawn,
    kernels_forced,
)
from tnp.dispatch import selection
from tnp.dispatch.devices import named
from tnp.dispatch.spec import Call
from tnp.ops._shared.norms import COLUMNS
from tnp.ops.rms_norm import (
    ADD_RMS_NORM,
    OPERATORS,
    RMS_NORM,
    add_rms_norm,
    rms_norm,
    triton_rms_norm,
)


# On both sides of a tile's rows at this width.
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
@pytest.mark.parametrize("rows, width", [(1, 60), (33, 60), (13, 1)])
def test_every_kernel_at_ragged_sizes(operator, rows, width):
    inputs = drawn(operator, rows, width, start=1)
    for forced in kernels_forced(operator, inputs):
        results = differentiated(operator, "fused", inputs, forced=forced)
        assert_within_budget(operator, results, inputs)


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


def test_what_is_not_wanted_changes_nothing():
    inputs = drawn(ADD_RMS_NORM, 9, 48)
    whole = differentiated(ADD_RMS_NORM, "fused", inputs)
    for wanted in (("x",), ("update",), ("weight",), ("update", "weight")):
        part = differentiated(ADD_RMS_NORM, "fused", inputs, wanted)
        assert all(torch.equal(part[name], whole[name]) for name in part), wanted


def test_memory_that_nobody_wrote_is_not_read():
    """PyTorch fills what is allocated with NaN where it is asked for deterministic algorithms."""
    inputs = {op.name: drawn(op, 7, 40) for op in OPERATORS}
    expected = {op.name: differentiated(op, "fused", inputs[op.name]) for op in OPERATORS}
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        for operator in OPERATORS:
            given = inputs[operator.name]
            for forced in kernels_forced(operator, given):
                results = differentiated(operator, "fused", given, forced=forced)
                for name, x in results.items():
                    torch.testing.assert_close(x, expected[operator.name][name])
    finally:
        torch.use_deterministic_algorithms(False)


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


def strided(*shape: int) -> list[torch.Tensor]:
    """[3, 5, 48]: rows apart, one row expanded, columns apart, four dimensions that do not join."""
    return [
        torch.randn(5, 3, 48, device=DEVICE).transpose(0, 1),
        torch.randn(1, 1, 48, device=DEVICE).expand(3, 5, 48),
        torch.randn(3, 48, 5, device=DEVICE).mT,
        torch.randn(3, 5, 96, device=DEVICE)[..., ::2],
    ]


@pytest.mark.parametrize("at", range(4))
def test_any_strides(at):
    x, update = strided()[at].requires_grad_(), strided()[at - 1].requires_grad_()
    weight = torch.randn(96, device=DEVICE)[::2].requires_grad_()
    results = []
    for name in ("fused", "torch"):
        total, normalized = add_rms_norm(x, update, weight, implementation=name)
        loss = total.sum() + 2 * normalized.sum()  # expanded gradients
        results.append((total, normalized, *torch.autograd.grad(loss, (x, update, weight))))
    for ours, own in zip(*results, strict=True):
        torch.testing.assert_close(ours, own, atol=1e-4, rtol=1e-4)
    assert results[0][0].is_contiguous() and results[0][1].is_contiguous()


def test_dimensions_that_do_not_join_are_copied():
    x = torch.randn(2, 5, 3, 48, device=DEVICE).transpose(1, 2)
    weight = torch.randn(48, device=DEVICE)
    torch.testing.assert_close(
        rms_norm(x, weight, implementation="fused"), rms_norm(x.contiguous(), weight)
    )


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


def test_a_weight_of_16_bits_gets_a_gradient_of_16_bits():
    x, weight = drawn(RMS_NORM, 9, 48, "bfloat16").values()
    small = weight.bfloat16().requires_grad_()
    out = rms_norm(x, small, implementation="fused")
    assert torch.equal(out, rms_norm(x, small.float(), implementation="fused"))
    (dweight,) = torch.autograd.grad(out.sum(), small)
    own = torch.autograd.grad(rms_norm(x.double(), small.double()).sum(), small)[0]
    torch.testing.assert_close(dweight, own)


def test_float64_by_torch():
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rms_norm, (x, weight))
    assert torch.autograd.gradcheck(lambda x, w: add_rms_norm(x, 2 * x, w), (x, weight))


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"x": torch.zeros(2, 7)}, ValueError, r"x is \(2, 7\) and weight \(8,\): they must be"),
        ({"weight": torch.zeros(8, 1)}, ValueError, r"and weight \(8, 1\): they must be"),
        ({"x": torch.zeros(2, 0), "weight": torch.zeros(0)}, ValueError, "with D at least 1"),
        ({"x": torch.tensor(1.0)}, ValueError, r"x is \(\) and weight"),
        ({"eps": 0.0}, ValueError, "eps is 0.0: it must be positive and finite"),
        ({"eps": float("nan")}, ValueError, "eps is nan: it must be positive and finite"),
        ({"implementation": "quick"}, ValueError, "unknown implementation 'quick' of rms_norm"),
        ({"x": torch.zeros(2, 8).double()}, RuntimeError, "takes .*, not float64"),
        (
            {"x": torch.zeros(2, 16_385), "weight": torch.zeros(16_385)},
            RuntimeError,
            "it takes widths up to 16384, not 16385",
        ),
    ],
)
def test_refusals(change, error, message):
    arguments = {"x": torch.zeros(2, 8), "weight": torch.zeros(8), "implementation": "fused"}
    arguments |= change
    with pytest.raises(error, match=message):
        rms_norm(arguments.pop("x"), arguments.pop("weight"), **arguments)


def test_a_number_that_is_no_float_is_one():
    x, weight = drawn(RMS_NORM, 3, 8).values()
    whole = rms_norm(x, weight, eps=1, implementation="fused")
    assert torch.equal(whole, rms_norm(x, weight, eps=1.0, implementation="fused"))


@pytest.mark.parametrize(
    "update", [torch.zeros(2, 7, 8), torch.zeros(2, 8).half()], ids=["shape", "dtype"]
)
def test_an_update_is_like_x(update):
    with pytest.raises(ValueError, match=r"update is torch.float.* and x .*: they must be equal"):
        add_rms_norm(torch.zeros(2, 8), update, torch.zeros(8), implementation="fused")


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
