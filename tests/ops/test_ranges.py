"""Tests that the device asserts numbers in range with TNP_CHECK=1.

That they are NaN in their sequence without it is what the gates of the operators prove.
"""

import pytest
import torch

from tests.ops.problems import DEVICE
from tnp.dispatch import call as dispatch
from tnp.dispatch.call import forget
from tnp.dispatch.registry import catalog

ROWS = torch.ones(2, 1, 8, 16)
PACK, WEIGHT, X, COS = ROWS[:1], torch.ones(48, 16), torch.ones(2, 8, 16), torch.ones(8, 8)
PARAMETERS, Y, LOGITS = torch.ones(2, 8, 3, 3), torch.ones(2, 8, 1), torch.ones(2, 48)


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


ENDS = int32(0, 3, 8)
# Operator, implementation, its tensors but the numbers, options, numbers that fit, and what does
# not, with the device's sentence.
CALLS = {
    "attention": (
        "attention", "fused", lambda n: (ROWS, ROWS, ROWS, n, None, None), (), int32(1, 8),
        [int32(0, 8), int32(1, 9)], "n_keys must lie between 1 and n_k = 8",
    ),
    "cu_seqlens_q": (
        "attention", "separate", lambda cu: (PACK, PACK, PACK, None, cu, ENDS), (), ENDS,
        [int32(1, 3, 8), int32(0, 9, 8), int32(0, 3, 7)],
        "cu_seqlens_q must begin with 0, never decrease and end with q's 8 rows",
    ),
    "cu_seqlens_k": (
        "attention", "fused", lambda cu: (PACK, PACK, PACK, None, ENDS, cu), (), ENDS,
        [int32(0, -1, 8)],
        "cu_seqlens_k must begin with 0, never decrease and end with k's 8 rows",
    ),
    "buffered_attention": (
        "buffered_attention", "triton", lambda n: (ROWS, ROWS, ROWS, n),
        (("n_buffer", 3), ("all_rows", True)), int32(1, 5),
        [int32(1, 6)], "n_keys must lie between 1 and n_k − n_buffer = 5",
    ),
    "project_qkv": (
        "project_qkv", "fused", lambda n: (X, WEIGHT, n), (("n_heads", 1), ("centred", True)),
        int32(1, 8), [int32(0, 8), int32(1, 9)], "n_keys must lie between 1 and n_k = 8",
    ),
    "decode_attention": (
        "decode_attention", "triton", lambda n: (ROWS, ROWS, ROWS, n, None, None, None), (),
        int32(0, 8), [int32(-7, 8), int32(0, 500)], "n_keys must lie between 0 and",
    ),
    "page_table": (
        "decode_attention", "triton",
        lambda table: (ROWS, ROWS.repeat(2, 1, 2, 1), ROWS.repeat(2, 1, 2, 1), int32(5, 8), table)
        + (None, None), (), int32(0, 3)[:, None],
        [int32(-1, 3)[:, None], int32(0, 10**6)[:, None]], "pages must lie between 0 and",
    ),
    "rope": (
        "rope", "triton", lambda at: (ROWS, ROWS, COS, COS, at), (), int32(*range(8)).repeat(2, 1),
        [int32(-1, *range(7)).repeat(2, 1), int32(*range(1, 9)).repeat(2, 1)],
        "positions must lie between 0 and 7",
    ),
    "mixture_nll": (
        "mixture_nll", "fused", lambda n: (PARAMETERS, Y, n), (), int32(0, 8),
        [int32(-1, 8), int32(0, 9)], "n_targets must lie between 0 and 8",
    ),
    "cross_entropy": (
        "cross_entropy", "triton", lambda target: (LOGITS, target), (), torch.tensor([47, -100]),
        [torch.tensor([0, 48]), torch.tensor([-1, 0])], "target must lie between 0 and 47",
    ),
    "linear_cross_entropy": (
        "linear_cross_entropy", "triton", lambda target: (LOGITS[:, :16], WEIGHT, target), (),
        torch.tensor([47, -100]), [torch.tensor([0, 48])], "target must lie between 0 and 47",
    ),
}  # fmt: skip


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there an assertion ends the CUDA context")
@pytest.mark.parametrize("name", CALLS)
def test_the_device_asserts_where_asked(name, monkeypatch):
    """This calls below the public function, which reads the numbers itself where it can."""
    op, implementation, inputs, options, right, wrong, sentence = CALLS[name]
    operator = catalog().operator(op)

    def call(numbers):
        scalars = operator.numbers
        return dispatch.call(operator, implementation, inputs(numbers), scalars, options)

    forget()
    call(wrong[0])
    monkeypatch.setenv("TNP_CHECK", "1")  # read when a plan is made
    forget()
    for numbers in wrong:
        with pytest.raises(RuntimeError, match=sentence):
            call(numbers)
    call(right)
    forget()


@pytest.mark.parametrize("wrong", [0, 9])
def test_the_reference_gives_nan(wrong):
    """Uses a tensor that the host cannot read, as on a GPU."""
    found = catalog().load("attention", "reference").run
    o, right = (found(ROWS, ROWS, ROWS, int32(8, n), None, None, 0.25) for n in (wrong, 8))
    assert o[1].isnan().all() and torch.equal(o[0], right[0])


def test_pytorchs_loss_gives_nan():
    found = catalog().load("mixture_nll", "torch").run
    for wrong in (-1, 9):
        assert found(PARAMETERS, Y, int32(8, wrong), 0.0).isnan()
    assert found(PARAMETERS, Y, int32(8, 0), 0.0).isfinite()
