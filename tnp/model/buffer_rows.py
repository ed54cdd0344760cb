"""Arranges rows [context, buffer, followers, others], and says which keys each of them sees.

`buffered_attention` takes all rows at once. If it refuses them, the rows are split for several
calls of attention, and the results are joined. Each row is copied once each way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.nn.functional import pad

from tnp.dispatch import devices, selection
from tnp.dispatch.derivatives import is_batched
from tnp.dispatch.private import functorch_level, in_forward_mode
from tnp.dispatch.registry import catalog
from tnp.dispatch.spec import Call
from tnp.ops.buffered_attention import OPERATOR, buffered_attention


def behind(lengths: torch.Tensor, n_first: int, n: int) -> torch.Tensor:
    """Returns the order, int64 [B, n_first + n], in which n rows follow each sample's first
    lengths[b].

    A sample has n_first rows, of which the first lengths[b] are real, and then n more rows. Padding
    comes last.
    """
    place = torch.arange(n_first + n, device=lengths.device)
    moved = (place + n_first - lengths[:, None]).clamp(max=n_first + n - 1)
    return torch.where(place < lengths[:, None], place, moved)


def in_wide_elements(*xs: torch.Tensor) -> list[torch.Tensor]:
    """Views tensors [..., D] in elements of 16 bytes if all of them allow it.

    PyTorch's copy of strided rows moves one element a thread, so fewer and wider elements take less
    time. Compiled copies need no such help.
    """
    wide = 16 // xs[0].element_size()

    def fits(x: torch.Tensor) -> bool:
        steps = x.shape[-1], x.storage_offset(), *x.stride()[:-1]
        return x.stride(-1) == 1 and not any(n % wide for n in steps)

    if torch.compiler.is_compiling() or _is_transformed(*xs) or not all(map(fits, xs)):
        return list(xs)
    return [x.view(torch.complex128) for x in xs]


def _is_transformed(*xs: torch.Tensor) -> bool:
    """Returns whether forward mode or a transform of `torch.func` is open, or xs are batched.

    These support only PyTorch's own differentiable operations.
    """
    return functorch_level() is not None or in_forward_mode() or is_batched(xs)


def _in_elements_of(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype == dtype else x.view(dtype)  # a view has no gradient


def _split(x: torch.Tensor, sizes: tuple[int, ...], n: int) -> tuple[torch.Tensor, ...]:
    """Splits rows [B, L, H, D] into rows that see only the context, which are the first and the
    last of L, and G groups of n rows beside the buffer.

    Group g of head h becomes head h · G + g, which reads keys of head h: [B, n, H · G, D].
    """
    first, beside, others = in_wide_elements(*x.split(sizes, 1))
    alone = torch.cat([first, others], 1) if sizes[0] else others
    batch, rows, *head = beside.shape  # `view` and `reshape` take batched gradients
    groups = beside.view(batch, rows // n, n, *head).permute(0, 2, 3, 1, 4)
    grouped = groups.reshape(batch, n, head[0] * (rows // n), head[1])
    return _in_elements_of(alone, x.dtype), _in_elements_of(grouped, x.dtype)


def _join(sizes: tuple[int, ...], alone: torch.Tensor, grouped: torch.Tensor) -> torch.Tensor:
    """Joins what `_split` has split."""
    batch, n, heads, width = grouped.shape
    groups = grouped.view(batch, n, alone.shape[2], heads // alone.shape[2], width).unbind(3)
    first, others = alone.split([sizes[0], sizes[2]], 1)
    joined = torch.cat(in_wide_elements(first, *groups, others), 1)
    return _in_elements_of(joined, alone.dtype)


class _Split(torch.autograd.Function):
    """Splits rows, and joins gradients: autograd's own would copy most rows three times."""

    @staticmethod
    def forward(ctx, x, sizes, n):
        ctx.sizes, ctx.n = sizes, n
        return _split(x, sizes, n)

    @staticmethod
    def backward(ctx, *gradients):
        if torch.is_grad_enabled():  # the backward pass has create_graph
            return _Join.apply(ctx.sizes, ctx.n, *gradients), None, None
        return _join(ctx.sizes, *gradients), None, None


class _Join(torch.autograd.Function):
    """Joins rows, and splits their gradient."""

    @staticmethod
    def forward(ctx, sizes, n, *parts):
        ctx.sizes, ctx.n = sizes, n
        return _join(sizes, *parts)

    @staticmethod
    def backward(ctx, gradient):
        split = _Split.apply if torch.is_grad_enabled() else _split
        return None, None, *split(gradient, ctx.sizes, ctx.n)


class _Keys(torch.autograd.Function):
    """Returns keys and values of the first m points, and of all points.

    The gradient of the first is added in place to the gradient of all, which nothing else uses. So
    dk and dv stay halves of the same rows, which the projection multiplies in one product.
    """

    @staticmethod
    def forward(ctx, k, v, m):
        ctx.m = m
        return k[:, :, :m], v[:, :, :m], k, v

    @staticmethod
    def backward(ctx, dk_first, dv_first, dk, dv):
        # With create_graph the gradient has a graph, so it is not changed in place.
        if torch.is_grad_enabled() or _is_transformed(dk, dv):
            behind = (0, 0, 0, dk.shape[2] - ctx.m)
            return dk + pad(dk_first, behind), dv + pad(dv_first, behind), None
        if dk.data_ptr() == dv.data_ptr() or 0 in (*dk.stride(), *dv.stride()):
            dk, dv = dk.clone(), dv.clone()  # both may be one tensor, or an expanded one
        for whole, first in ((dk, dk_first), (dv, dv_first)):
            whole.narrow(2, 0, ctx.m).add_(first)
        return dk, dv, None


@lru_cache(maxsize=4096)
def _refusal(
    implementation: str, dtype: torch.dtype, device: torch.device, wanted: tuple[str, ...],
    **problem: int | bool,
) -> str | None:  # fmt: skip
    """Returns why it cannot serve the problem. The answer is cached, because every block asks."""
    call = Call(
        OPERATOR.problem(str(dtype).removeprefix("torch."), **problem),
        devices.of_device(device), wanted,
    )  # fmt: skip
    return selection.refuses(catalog().load(OPERATOR.name, implementation), call)


@dataclass(frozen=True)
class BufferedRows:
    """Describes rows [context, buffer, followers, others], and the keys that each row sees.

    Followers are `n_groups` groups, each with as many targets as the buffer has points. Target i of
    a group sees the context and points 0 … i. Others see only the context.
    """

    n_context: int
    n_buffer: int
    n_groups: int
    n_rows: int
    lengths: torch.Tensor | None  # int32 [B], points of each context

    def refuses(self, implementation: str | None, q: torch.Tensor, k: torch.Tensor) -> str | None:
        """Returns why this `buffered_attention` cannot serve q and keys, or None."""
        if implementation is None:
            return "the variant's attention has no counterpart that takes all kinds of rows at once"
        if torch.compiler.is_compiling():
            return "torch.compile makes the copies by itself"
        batch, n_heads, n_q, head_dim = q.shape
        return _refusal(
            implementation, q.dtype, q.device,
            OPERATOR.differentiated if torch.is_grad_enabled() else (),
            batch=batch, n_heads=n_heads, n_q=n_q, n_k=k.shape[2], head_dim=head_dim,
            n_buffer=self.n_buffer, n_groups=self.n_groups, all_rows=n_q == self.n_rows,
            n_keys=self.lengths is not None,
        )  # fmt: skip

    def at_once(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, base2: bool, implementation: str
    ) -> torch.Tensor:
        """Returns [B, rows of q, width] from one launch, for the same rows as `around`."""
        o = buffered_attention(
            q, k, v, self.n_buffer, n_groups=self.n_groups, all_rows=q.shape[2] == self.n_rows,
            n_keys=self.lengths, base2=base2, implementation=implementation,
        )  # fmt: skip
        return o.transpose(1, 2).flatten(2)

    def around(
        self, heads: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Returns [B, rows of q, width].

        Each kind of rows takes one call heads(q, k, v, n_keys, causal).

        Args:
            heads: takes q [B, H, n_q, D], keys and values, and returns [B, n_q, H · D]. The
                gradients that it returns for keys and values are changed in place, so nothing else
                may keep them.
            q: [B, H, rows, D]: all rows, or only rows of followers and other targets.
            k, v: [B, H, n_context + n_buffer, D].
        """
        m, n = self.n_context, self.n_buffer
        of_all = q.shape[2] == self.n_rows
        n_first, n_groups = (m, 1 + self.n_groups) if of_all else (0, self.n_groups)
        sizes = n_first, n_groups * n, q.shape[2] - n_first - n_groups * n
        of_context = k[:, :, :m], v[:, :, :m]
        plain = not torch.compiler.is_compiling() and _is_transformed()
        split, join = (_split, _join) if plain else (_Split.apply, _Join.apply)
        if not torch.compiler.is_compiling() and not plain:  # these add nothing in place
            *of_context, k, v = _Keys.apply(k, v, m)
        n_keys = None if self.lengths is None else self.lengths + n
        of_all_keys = self._following(k), self._following(v), n_keys, True

        def seen(rows: torch.Tensor, *keys: Any) -> torch.Tensor:
            return heads(rows.transpose(1, 2), *keys).view(rows.shape) if rows.shape[1] else rows

        # Our attention writes o and dq as [B, rows, H, D], and the projections read this layout.
        alone, beside = split(q.transpose(1, 2), sizes, n)
        o = seen(alone, *of_context, self.lengths), seen(beside, *of_all_keys)
        return (join(sizes, *o) if plain else join(sizes, n, *o)).flatten(2)

    def _following(self, x: torch.Tensor) -> torch.Tensor:
        """Returns keys or values in which each sample's buffer follows its own context."""
        if self.lengths is None:
            return x
        order = behind(self.lengths, self.n_context, self.n_buffer)
        return x.gather(2, order[:, None, :, None].expand_as(x))
