"""Tests layouts of queries, keys and values: there and back, without copies, and refusals."""

import pytest
import torch

from tests.ops.problems import DEVICE
from tnp.ops.attention import attention
from tnp.ops.attention.layouts import (
    from_rows,
    grouped,
    heads_first,
    to_rows,
    tokens_first,
    ungrouped,
)

# [B, H, T, D] of ragged sizes: contiguous, a part of a projection [B, T, 2 H, D], every second
# token, and one head for all.
X = torch.arange(2 * 6 * 7 * 5, device=DEVICE).float().view(2, 6, 7, 5)
INPUTS = {
    "contiguous": X,
    "of a projection": torch.cat([X, X], 1).transpose(1, 2).contiguous()[:, :, 6:].transpose(1, 2),
    "every second token": X.repeat_interleave(2, 2)[:, :, ::2],
    "expanded": X[:, :1].expand(2, 6, 7, 5),
    "no tokens": X[:, :, :0],
}
every = pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS)


def shares(y: torch.Tensor, x: torch.Tensor) -> bool:
    return y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@every
def test_there_and_back(x):
    assert tokens_first(x).shape == (2, x.shape[2], 6, 5)
    for y in (heads_first(tokens_first(x)), tokens_first(heads_first(x)), from_rows(to_rows(x), 2)):
        assert torch.equal(y, x)
    for n_kv_heads in (1, 2, 3, 6):
        assert grouped(x, n_kv_heads).shape == (2, n_kv_heads, 6 // n_kv_heads, x.shape[2], 5)
        assert torch.equal(ungrouped(grouped(x, n_kv_heads)), x)


@every
def test_layouts_are_views_where_possible(x):
    for y in (tokens_first(x), heads_first(x), grouped(x, 3), ungrouped(grouped(x, 3))):
        assert shares(y, x)
    result = tokens_first(x).contiguous().transpose(1, 2)  # as ours lay out theirs
    assert shares(to_rows(result), result) and to_rows(result).is_contiguous()


def test_each_element_stands_where_it_should():
    b, h, t = 1, 4, 3
    row = X[b, h, t]
    assert torch.equal(tokens_first(X)[b, t, h], row)
    assert torch.equal(to_rows(X)[b * 7 + t, h], row)
    assert torch.equal(grouped(X, 2)[b, h // 3, h % 3, t], row)


def test_heads_are_grouped_as_attention_groups_them():
    """A formula over the grouped layout: no head of keys is repeated."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 9, 16, generator=generator).to(DEVICE) for h in (6, 2, 2))
    p = torch.softmax(grouped(q, 2) @ k[:, :, None].mT / 4, -1)
    expected = ungrouped(p @ v[:, :, None])
    for name in ("reference", "separate"):
        o = attention(q, k, v, implementation=name)
        torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: grouped(X, 4), "n_kv_heads is 4: it must divide q's 6 heads"),
        (lambda: grouped(X, 0), "n_kv_heads is 0: it must divide q's 6 heads"),
        (lambda: from_rows(to_rows(X), 3), "batch is 3: it must divide x's 14 rows"),
        (lambda: grouped(X[0], 2), r"x has shape \(6, 7, 5\): it must be \[B, H, T, D\]"),
        (lambda: heads_first(X[0]), r"x has shape \(6, 7, 5\): it must be \[B, T, H, D\]"),
        (lambda: from_rows(X, 2), r"x has shape \(2, 6, 7, 5\): it must be \[B · T, H, D\]"),
        (lambda: ungrouped(X), r"it must be \[B, H_kv, G, T, D\]"),
    ],
)
def test_bad_layouts_are_one_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
