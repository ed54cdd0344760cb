"""Tests how a block with a buffer moves rows around attention and back, and their gradients."""

import pytest
import torch

from tests.buffers import ROOM, WITH, task_of, with_role
from tests.model.test_transformer_np import build
from tests.ops.problems import DEVICE
from tnp.model import layers
from tnp.model.buffer_rows import BufferedRows
from tnp.model.variants import Variant
from tnp.ops.attention import attention


@pytest.mark.parametrize("head_dim", [8, 6])  # 16 bytes of bfloat16, and no multiple of them
@pytest.mark.parametrize("n_groups", [1, 2])
@pytest.mark.parametrize("last", [False, True])
def test_rows_come_back_from_attention_in_their_order(head_dim, n_groups, last):
    m, n, n_others, n_heads = 5, 3, 4, 2
    layout = BufferedRows(m, n, n_groups, m + n * (1 + n_groups) + n_others, None)
    x = torch.randn(2, layout.n_rows, n_heads, head_dim, dtype=torch.bfloat16, requires_grad=True)
    keys = torch.randn(2, 2, n_heads, m + n, head_dim, dtype=torch.bfloat16)
    x = x[:, m + n :] if last else x  # of the last block targets alone
    asked = []

    def heads(q, k, v, n_keys, causal=False):
        asked.append((q.shape[2], k.shape[2], causal))
        if causal:  # each group has every row of its head
            groups = x[:, 0 if last else m : -n_others].unflatten(1, (-1, n))
            assert torch.equal(q.unflatten(1, (n_heads, -1)), groups.permute(0, 3, 1, 2, 4))
        return q.transpose(1, 2).flatten(2)

    o = layout.around(heads, x.transpose(1, 2), *keys)
    assert torch.equal(o, x.flatten(2))
    gradient = torch.randn_like(o)
    (found,) = torch.autograd.grad(o, x, gradient)
    assert torch.equal(found, gradient.view(x.shape))
    n_alone = n_others if last else m + n_others
    assert asked == [(n_alone, m, False), (n, m + n, True)]


@pytest.mark.parametrize("in_halves", [True, False])
def test_gradients_of_keys_add_up_and_stay_halves_of_the_same_rows(in_halves):
    """As which attention of ours makes them, and one product of the projection takes both."""
    layout, made = BufferedRows(5, 3, 1, 13, None), []

    class Some(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.shape = k.transpose(1, 2).shape
            return torch.zeros_like(q)

        @staticmethod
        def backward(ctx, do):
            batch, n_k, *row = ctx.shape
            both = torch.randn(batch, n_k, 2, *row).permute(2, 0, 3, 1, 4)
            made.append(both.clone())
            return do, *(both if in_halves else both.contiguous())

    def heads(q, k, v, n_keys, causal=False):
        return Some.apply(q, k, v).transpose(1, 2).flatten(2)

    q, k, v = (torch.randn(2, 2, n, 4, requires_grad=True) for n in (13, 8, 8))
    dk, dv = torch.autograd.grad(layout.around(heads, q, k, v).sum(), (k, v))
    if in_halves:
        assert dv.data_ptr() - dk.data_ptr() == 2 * 4 * dk.element_size()
    # Both passes ask for the context's points, one asks for the buffer's.
    of_context, expected = sorted(made, key=lambda both: both.shape[3])
    expected[:, :, :, :5] += of_context
    torch.testing.assert_close(torch.stack([dk, dv]), expected)


def test_gradients_of_keys_that_share_memory_are_copied_first():
    """Takes gradients as PyTorch's sums give them: one tensor for both, one number for all."""
    rows = BufferedRows(3, 2, 1, 9, None)
    q = torch.randn(1, 1, 9, 4, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 1, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def heads(q, k, v, n_keys, causal=False):
        return (q.sum() + (k + v).sum()) * torch.ones_like(q).transpose(1, 2).flatten(2)

    o = rows.around(heads, q, k, v)
    dk, dv = torch.autograd.grad(o.sum(), (k, v))
    of_context, of_all = 4.0 * 5, 4.0 * 4  # numbers of o whose rows see the context alone, or all
    expected = torch.full_like(k, of_all)
    expected[:, :, :3] += of_context
    assert torch.equal(dk, expected) and torch.equal(dv, expected)


def test_gradients_of_gradients_are_right():
    rows = BufferedRows(3, 2, 1, 9, None)
    q, k, v = torch.randn(3, 1, 1, 9, 4, dtype=torch.float64)

    def heads(q, k, v, n_keys, causal=False):
        return (q @ k.mT @ v).transpose(1, 2).flatten(2)

    leaves = [x.clone().requires_grad_() for x in (q, k[:, :, :5], v[:, :, :5])]

    def around(*qkv):
        return rows.around(heads, *qkv)

    assert torch.autograd.gradgradcheck(around, leaves)
    # PyTorch's attention has these derivatives, and so have the rows around it.
    assert torch.autograd.gradcheck(around, leaves, check_forward_ad=True, check_batched_grad=True)
    found = torch.func.grad(lambda *qkv: around(*qkv).square().sum(), (0, 1, 2))(*leaves)
    expected = torch.autograd.grad(around(*leaves).square().sum(), leaves)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("lengths", [None, [4, 9]])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("base2", [False, True])
def test_rows_at_once_are_rows_apart(lengths, last, base2):
    """o, and gradients of q, k and v; in the last block targets alone."""
    m, n = 9, 5
    n_keys = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    layout = BufferedRows(m, n, 2, m + 3 * n + 4, n_keys)
    n_q = layout.n_rows - (m + n) * last
    shapes = (2, 2, n_q, 32), (2, 2, m + n, 32), (2, 2, m + n, 32)
    inputs = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes]
    assert layout.refuses("triton", *inputs[:2]) is None

    def heads(q, k, v, n_keys, causal=False):
        named = {"base2": base2, "causal": causal, "n_keys": n_keys}
        o = attention(q, k, v, **named, implementation="reference")
        return o.transpose(1, 2).flatten(2)

    found = layout.at_once(*inputs, base2, "triton"), layout.around(heads, *inputs)
    do = torch.randn_like(found[0])
    of_both = [(o, *torch.autograd.grad(o, inputs, do)) for o in found]
    for one, other in zip(*of_both, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def test_why_rows_are_taken_apart():
    layout = BufferedRows(200, 70, 1, 400, None)
    q, k = torch.zeros(1, 1, 400, 32, device=DEVICE), torch.zeros(1, 1, 270, 32, device=DEVICE)
    assert "no counterpart" in layout.refuses(None, q, k)
    assert "200 points of the context with 70 of the buffer are 6" in layout.refuses("triton", q, k)
    asked = []

    def run(q):
        asked.append(layout.refuses("triton", q, k))
        return q + 1

    torch.compile(run, backend="eager")(q)
    assert "torch.compile makes" in asked[0]


@pytest.mark.parametrize("attention", ["fused", "reference"])
def test_blocks_take_rows_at_once_where_they_may(monkeypatch, attention):
    for name in ("fused", "separate", "portable", "sdpa_flash", "reference", "auto"):
        found = Variant("some", attention=name).buffered_attention
        assert found == ("triton" if name in ("fused", "separate") else None)
    calls = []
    run = layers.BufferedRows.at_once
    monkeypatch.setattr(
        layers.BufferedRows, "at_once", lambda *given: calls.append(1) or run(*given)
    )
    model = with_role(build(WITH, attention=attention, dtype=torch.bfloat16)).to(DEVICE)
    task = task_of(2 * ROOM + 1).to(DEVICE, dtype=torch.float32)
    model.loss(task).backward()
    assert len(calls) == (len(model.blocks) if attention == "fused" else 0)
