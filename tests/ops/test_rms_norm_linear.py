"""The norm with its linear layer: configurations, views, and what it is made of.

The gate compares it with float64 (`tests.gates.test_operators`).
"""

import pytest
import torch

from tests.ops.problems import DEVICE
from tnp.dispatch import plans
from tnp.dispatch.spec import Case
from tnp.gates.checks import error_ratio
from tnp.ops._shared.random_values import Random
from tnp.ops.rms_norm import add_rms_norm
from tnp.ops.rms_norm_linear import OPERATOR, reference, rms_norm_linear, triton_rms_norm_linear

CONFIGS = [
    config
    for by_itemsize in (triton_rms_norm_linear.FEW_ROWS, triton_rms_norm_linear.MANY_ROWS)
    for config in by_itemsize.values()
]


def drawn(dtype: str, rows: int, width: int, n_out: int, **draw) -> tuple[torch.Tensor, ...]:
    case = Case(OPERATOR.problem(dtype, rows=rows, width=width, n_out=n_out), tuple(draw.items()))
    return tuple(OPERATOR.draw(case, Random(case, DEVICE)).values())


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("width", [48, 600])  # within a block of any configuration, and beyond
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_configuration_at_ragged_sizes(config, silu, width, dtype):
    inputs = drawn(dtype, 35, width, 70, start=1)
    forced = {"rms_norm_linear.forward": ("triton", config)}
    options = (("silu", True),) if silu else ()
    found = plans.build(OPERATOR, "triton", inputs, options, (), None, forced).run(inputs, (1e-6,))
    exact = reference(*(x.double() for x in inputs), 1e-6, silu)
    plain = reference(*inputs, 1e-6, silu)
    for one, other, true in zip(found, plain, exact, strict=True):
        floor = 2.0**-22 * true.norm().item() if dtype == "float32" else 0.0
        assert error_ratio(one, other, true, floor) <= OPERATOR.budget.outputs


def test_the_sum_is_that_of_the_norm_alone():
    """Rounded before it is normalized, to the same bits."""
    x, update, norm_weight, weight = drawn("bfloat16", 6, 48, 24, batch=2)
    total, _ = rms_norm_linear(x, update, norm_weight, weight, implementation="triton")
    expected, _ = add_rms_norm(x, update, norm_weight, implementation="fused")
    assert torch.equal(total, expected)


def test_any_strides_and_nothing_to_do():
    x, update, norm_weight, weight = drawn("float32", 12, 48, 24)
    for view in (
        lambda x: x.view(3, 4, 48).transpose(0, 1),
        lambda x: x.view(2, 6, 48)[:, 1:],
        lambda x: x.t().contiguous().t(),
        lambda x: x[0],
        lambda x: x[:0],
    ):
        inputs = view(x), view(update).contiguous(), norm_weight, weight.t().contiguous().t()
        expected = rms_norm_linear(*inputs)
        for y, z in zip(rms_norm_linear(*inputs, implementation="triton"), expected, strict=True):
            torch.testing.assert_close(y, z)
            assert y.is_contiguous()


def bad_inputs():
    x, gain, weight = torch.zeros(4, 32), torch.ones(32), torch.zeros(8, 32)
    yield r"weight \(8, 31\): they must be \[..., D\] and \[n_out, D\]", (x, x, gain, weight[:, 1:])
    yield r"weight \(32,\): they must be", (x, x, gain, weight[0])
    yield "update is", (x, x[:3], gain, weight)
    yield r"norm_weight \(31,\): they must be \[..., D\] and \[D\]", (x, x, gain[1:], weight)
    yield "norm_weight is torch.int64: it must be a float dtype", (x, x, gain.long(), weight)
    yield "norm_weight is on meta and x on cpu", (x, x, gain.to("meta"), weight)
    yield "weight is torch.int64: it must be a float dtype", (x, x, gain, weight.long())
    yield "weight is on meta and x on cpu", (x, x, gain, weight.to("meta"))
    yield "weight asks for a gradient and rms_norm_linear gives none", (
        x, x, gain, weight.clone().requires_grad_(),
    )  # fmt: skip


@pytest.mark.parametrize("message, inputs", list(bad_inputs()), ids=lambda value: str(value)[:30])
def test_bad_input_is_one_sentence(message, inputs):
    with pytest.raises(ValueError, match=message):
        rms_norm_linear(*inputs, implementation="triton")
