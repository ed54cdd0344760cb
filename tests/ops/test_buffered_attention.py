"""Attention around a buffer: configurations, shares of few heads, and what is refused.

The gate compares it with float64 (`tests.gates.test_operators`).
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.ops.problems import DEVICE
from tnp.dispatch import devices, plans
from tnp.dispatch.spec import Case
from tnp.gates.checks import error_ratio
from tnp.ops._shared.random_values import Random
from tnp.ops.buffered_attention import (
    OPERATOR,
    buffered_attention,
    reference,
    triton_backward,
    triton_forward,
)

NAMES = "q", "k", "v"


def drawn(m, n, n_groups, n_others, all_rows=True, dtype="float32", head_dim=32, batch=1, **named):
    """Inputs that ask for gradients, what a call passes besides, and the problem."""
    n_q = (m if all_rows else 0) + (n_groups + all_rows) * n + n_others
    sizes = {"batch": batch, "n_heads": 1, "n_q": n_q, "n_k": m + n, "head_dim": head_dim}
    options = {"n_buffer": n, "n_groups": n_groups, "all_rows": all_rows}
    options["n_keys"] = "lengths" in named
    case = Case(OPERATOR.problem(dtype, **sizes, **options), tuple(named.items()))
    tensors = OPERATOR.draw(case, Random(case, DEVICE))
    inputs = tuple(tensors.get(name) for name in OPERATOR.tensors)
    for x in inputs[:3]:
        x.requires_grad_()
    return inputs, OPERATOR.call_options(case.problem), case.problem


def gradients(run, inputs, do):
    o = run(*inputs)
    return o.detach(), *torch.autograd.grad(o, inputs[:3], do.to(o.dtype))


def assert_as_float64(run, inputs, options, dtype) -> None:
    """o and all gradients, in units of PyTorch's own error."""
    do = torch.randn(inputs[0].shape, device=DEVICE).to(inputs[0].dtype)
    formula = partial(reference, scale=0.125, **dict(options))
    double = [x if x is None or not x.is_floating_point() else x.detach().double() for x in inputs]
    for x in double[:3]:
        x.requires_grad_()
    exact, plain = gradients(formula, double, do), gradients(formula, inputs, do)
    for name, *results in zip(("o", *NAMES), gradients(run, inputs, do), plain, exact, strict=True):
        floor = 2.0**-22 * results[2].norm().item() if dtype == "float32" else 0.0
        assert error_ratio(*results, floor) <= OPERATOR.budget.gradients, name


CONFIGS = [  # dtype, operation, configuration
    pytest.param("bfloat16" if itemsize == 2 else "float32", pass_, config, id=f"{pass_}{config}")
    for pass_, found in (
        ("forward", triton_forward.CONFIGS.items()),
        ("backward", triton_backward.CONFIGS.items()),
        ("backward", [(2, triton_backward.WIDE_CONFIG)]),
    )
    for itemsize, config in found
]


@pytest.mark.parametrize("dtype, pass_, config", CONFIGS)
@pytest.mark.parametrize("n", [20, 70])  # one block of the buffer, and a second that is ragged
def test_every_configuration_at_ragged_sizes(dtype, pass_, config, n):
    inputs, options, _ = drawn(17, n, 1, 9, dtype=dtype)
    forced = {f"buffered_attention.{pass_}": ("triton", config)}
    plan = plans.build(OPERATOR, "triton", inputs, options, NAMES, None, forced)
    assert_as_float64(lambda *xs: plan.run(xs, (0.125,)), inputs, options, dtype)


@pytest.mark.parametrize("lengths", [{}, {"lengths": "5,67", "batch": 2}])
@pytest.mark.parametrize("all_rows", [True, False])
def test_programs_that_share_a_head_leave_partials(lengths, all_rows):
    """Of two blocks of the context and two of the buffer, the same rows in every block's turn."""
    inputs, options, _ = drawn(67, 66, 2, 40, all_rows, "bfloat16", **lengths)
    target = replace(devices.of_device(DEVICE), multiprocessors=6)
    plan = plans.build(OPERATOR, "triton", inputs, options, NAMES, target)
    assert_as_float64(lambda *xs: plan.run(xs, (0.125,)), inputs, options, "bfloat16")


def test_a_later_point_reaches_no_earlier_row():
    """Neither its key nor its value, to the bit; and no row of the context sees the buffer."""
    m, n = 5, 6
    (q, k, v, _), _, _ = drawn(m, n, 1, 4)
    with torch.no_grad():
        ours = partial(buffered_attention, n_buffer=n, n_groups=1, implementation="triton")
        before = ours(q, k, v)
        for i in range(n):
            others = [x.clone() for x in (k, v)]
            for x in others:
                x[:, :, m + i] += 1.0
            same = (ours(q, *others) == before).all(-1)[0, 0]
            sees = torch.zeros_like(same)
            for first in (m, m + n):
                sees[first + i : first + n] = True
            assert torch.equal(same, ~sees)


def test_rows_that_others_are_not_there_for():
    """Targets alone are what the last rows of all rows are."""
    (q, k, v, _), _, _ = drawn(20, 9, 2, 5)
    ours = partial(buffered_attention, n_buffer=9, n_groups=2, implementation="triton")
    every = ours(q, k, v)
    torch.testing.assert_close(ours(q[:, :, 29:], k, v, all_rows=False), every[:, :, 29:])


def test_more_keys_than_lie_on_chip_are_refused():
    (q, k, v, _), _, _ = drawn(129, 65, 0, 1)
    message = "it keeps 4 blocks of 64 keys on chip, and 129 points of the context with 65 of the"
    with pytest.raises(RuntimeError, match=f"{message} buffer are 5"):
        buffered_attention(q, k, v, 65, implementation="triton")
    (q, k, v, _), _, _ = drawn(5, 3, 0, 1, dtype="bfloat16", head_dim=48)
    with pytest.raises(RuntimeError, match="it takes head_dim 16, 32, 64 in bfloat16, not 48"):
        buffered_attention(q, k, v, 3, implementation="triton")


def bad_inputs():
    q, k = torch.zeros(2, 1, 20, 16), torch.zeros(2, 1, 8, 16)
    yield r"q has shape \(1, 20, 16\): it must be \[B, H, n_q, D\]", (q[0], k, k, 3), {}
    yield "v is torch.float64 and q is torch.float32", (q, k, k.double(), 3), {}
    yield r"v \(2, 1, 7, 16\): they must be equal", (q, k, k[:, :, 1:], 3), {}
    yield "they must agree but in their rows", (q, k[:1], k[:1], 3), {}
    yield "n_buffer is 0: it must be a whole number, at least 1", (q, k, k, 0), {}
    yield "n_buffer is 8 of 8 keys: the context needs at least one of them", (q, k, k, 8), {}
    yield "n_groups is -1: it must be a whole number, at least 0", (q, k, k, 3), {"n_groups": -1}
    yield "q has 20 rows: those of the context, the buffer and 5 groups that it must begin with", (
        q, k, k, 3,
    ), {"n_groups": 5}  # fmt: skip
    n_keys = torch.tensor([1, 6], dtype=torch.int32)
    yield "n_keys is 6 in sample 1: it must lie between 1 and 5", (q, k, k, 3), {"n_keys": n_keys}
    yield "n_buffer is 3.0: it must be a whole number", (q, k, k, 3.0), {}
    yield "n_groups is True: it must be a whole number", (q, k, k, 3), {"n_groups": True}
    yield "base2 is 'no': it must be True or False", (q, k, k, 3), {"base2": "no"}
    yield "all_rows is 1: it must be True or False", (q, k, k, 3), {"all_rows": 1}
    yield "scale is 0.0: it must be positive", (q, k, k, 3), {"scale": 0.0}
    yield "base2 is set", (q, k, k, 3), {"scale": 1.0, "base2": True}


@pytest.mark.parametrize("message, inputs, named", list(bad_inputs()), ids=lambda x: str(x)[:30])
def test_bad_input_is_one_sentence(message, inputs, named):
    with pytest.raises(ValueError, match=message):
        buffered_attention(*inputs, implementation="triton", **named)
