"""Tests attention around a buffer: programs that share a head, and who sees whom.

The gate compares it with float64 (`tests.gates.test_operators`).
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.ops.problems import DEVICE, assert_within_budget, results, setting
from tnp.dispatch import devices, plans
from tnp.gates.results import Setting
from tnp.ops.buffered_attention import OPERATOR, buffered_attention
from tnp.ops.buffered_attention.definition import sdpa


def drawn(m, n, n_groups, n_others, all_rows=True, dtype="float32", batch=1, **draw) -> Setting:
    n_q = (m if all_rows else 0) + (n_groups + all_rows) * n + n_others
    sizes = {"batch": batch, "n_heads": 1, "n_q": n_q, "n_k": m + n, "head_dim": 32}
    options = {"n_buffer": n, "n_groups": n_groups, "all_rows": all_rows, "n_keys": bool(draw)}
    return setting(OPERATOR, "triton", dtype, draw, **sizes, **options)


@pytest.mark.parametrize(
    "all_rows, lengths", [(True, {}), (False, {"lengths": "5,67", "batch": 2})], ids=str
)
def test_programs_that_share_a_head_leave_partials(all_rows, lengths):
    """Two blocks of the context and two of the buffer take the same rows in turn."""
    of = drawn(67, 66, 2, 40, all_rows, "bfloat16", **lengths)
    inputs, options = tuple(of.inputs.values()), tuple(of.options.items())
    target = replace(devices.of_device(DEVICE), multiprocessors=6)
    plan = plans.build(OPERATOR, "triton", inputs, options, of.wanted, target)
    assert_within_budget(of, results(of, lambda *given: plan.run(given[:4], given[4:])))


@pytest.mark.parametrize("lengths", [{}, {"lengths": "5,20", "batch": 2}], ids=str)
def test_sdpa_computes_the_formula(lengths):
    of = drawn(20, 9, 2, 5, **lengths)
    assert_within_budget(of, results(of, lambda *given: sdpa(*given, **of.options)))


def test_a_later_point_reaches_no_earlier_row():
    """The row depends on neither its key nor its value, to the bit."""
    m, n = 5, 6
    q, k, v, _ = drawn(m, n, 1, 4).inputs.values()
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


def test_targets_alone_are_the_last_of_all_rows():
    q, k, v, _ = drawn(20, 9, 2, 5).inputs.values()
    ours = partial(buffered_attention, n_buffer=9, n_groups=2, implementation="triton")
    every = ours(q, k, v)
    torch.testing.assert_close(ours(q[:, :, 29:], k, v, all_rows=False), every[:, :, 29:])
