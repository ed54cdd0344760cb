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


@pytest.mark.parametrize(
    "all_rows, lengths", [(True, {}), (False, {"lengths": "5,67", "batch": 2})], ids=str
)
def test_programs_that_share_a_head_leave_partials(all_rows, lengths):
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
