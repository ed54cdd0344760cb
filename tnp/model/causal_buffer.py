"""Adds points behind a context that is encoded once and kept: the causal buffer.

A point of the buffer sees the context, the points that entered before it, and itself. A target sees
the context and the points in the buffer. The context sees neither, so its keys and values do not
change (Hassan and others, Efficient Autoregressive Inference for Transformer Probabilistic Models,
arXiv 2510.09477).

With keys [context, buffer] this is causal attention: of n queries beside n points of the buffer,
query i sees the context and points 0 … i. Points of the buffer, and targets that see as many of
them, become heads that share keys, so no mask is made. Points have no embedding of their place: the
paper found no difference without (its appendix H.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tnp.dispatch import devices
from tnp.dispatch.spec import Call, Problem, triton_from
from tnp.model.buffer_rows import BufferedRows
from tnp.model.prediction import Encoding, Prediction
from tnp.tasks.task import Context, without_padding

if TYPE_CHECKING:
    from tnp.model.network import Network

Points = tuple[torch.Tensor, torch.Tensor]  # x [B, n, d_x], y [B, n, d_y]


def parameters(
    model: Network, context: Context, buffer: Points, x_target: torch.Tensor, n_groups: int
) -> torch.Tensor:
    """Returns mixture parameters [B, N, K, 1 + 2·d_y] at all targets, in one pass.

    Args:
        model: a model with a buffer.
        context: the context. All points are in the model's units, with zeros in place of padding.
        buffer: n points, in the order in which they enter.
        x_target: [B, N, d_x]: n_groups · n followers, group after group, and then other targets.
        n_groups: how many groups of followers there are.
    """
    m, n = context.x.shape[1], buffer[0].shape[1]
    x, y = (torch.cat(both, 1) for both in ((context.x, buffer[0]), (context.y, buffer[1])))
    h = model.embed.buffered(x, y, n, x_target, model.compute_dtype)
    rows = BufferedRows(m, n, n_groups, h.shape[1], context.lengths)
    return model.of_targets(h, m + n, context.lengths, rows)


def n_entering(room: int | None, n_target: int) -> int:
    """Returns how many of a training step's targets enter a buffer of `room`."""
    return 0 if room is None else min(room, n_target // 2)


def n_followed(n_points: int, n_target: int) -> int:
    """Returns how many targets of a training step see each number of points in the buffer."""
    return n_target // (2 * n_points) if n_points else 0


def training_parameters(
    model: Network,
    context: Context,
    x_target: torch.Tensor,
    y_target: torch.Tensor,
    target_lengths: torch.Tensor | None,
) -> torch.Tensor:
    """Returns mixture parameters [B, N, K, 1 + 2·d_y] at targets.

    Half of the targets see the buffer. The other targets see only the context, and some of them
    fill the buffer. The paper draws the number of visible points; here each number from 1 to n
    occurs equally often. Targets are taken in n turns of 2r. The first target of a turn enters the
    buffer, and the last r see all points that have entered. So a target sees only points before it,
    and no padding. Targets must be in random order.
    """
    n_target = x_target.shape[1]
    n = n_entering(model.config.buffer, n_target)
    if n == 0:
        return model(*context[:2], x_target, context.lengths, target_lengths)
    x_context, y_context = model.prepared_context(*context)
    x_target = model.prepared_x(x_target, target_lengths)
    y_target = without_padding(model.in_units("y", y_target), target_lengths)
    n_groups = n_followed(n, n_target)
    place = torch.arange(n_target, device=x_target.device)
    turns = place[: 2 * n_groups * n].view(n, 2, n_groups)
    entering, (others, followers) = turns[:, 0, 0], turns.unbind(1)
    order = torch.cat([followers.T.flatten(), others.flatten(), place[2 * n_groups * n :]])
    found = parameters(
        model,
        Context(x_context, y_context, context.lengths),
        (x_target[:, entering], y_target[:, entering]),
        x_target[:, order],
        n_groups,
    )
    back = torch.empty_like(order).scatter(0, order, place)  # the inverse order, without a sort
    return found.index_select(1, back)


def log_densities(
    model: Network, context: Context, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """Returns log p(y_i | x_i, context, points before i) of N points, [B, N], in one pass.

    All points but the last enter the buffer, and all but the first see the points before them. A
    single point needs no buffer, so any model serves.
    """
    if x.shape[1] <= 1:
        found = model(*context[:2], x, context.lengths)
    else:
        x_context, y_context = model.prepared_context(*context)
        x_in, y_in = model.prepared_x(x), model.in_units("y", y)
        found = parameters(
            model,
            Context(x_context, y_context, context.lengths),
            (x_in[:, :-1], y_in[:, :-1]),
            torch.cat([x_in[:, 1:], x_in[:, :1]], 1),
            n_groups=1,
        )
        found = torch.cat([found[:, -1:], found[:, :-1]], 1)
    return Prediction(found, model.config.sigma_min, model.normalization).log_prob(y)


class Buffer:
    """Keeps keys and values of a context, and of the points that have entered after it.

    Args:
        model: a model with a buffer.
        encoding: the encoded context.
        room: how many points may enter, and by how many points a later context may be longer, in
            all.
        repeats: how many copies each sample has, each with its own points. The first copies of all
            samples come first.

    Raises:
        ValueError: the model has no buffer.
    """

    @torch.no_grad()
    def __init__(self, model: Network, encoding: Encoding, room: int, repeats: int = 1) -> None:
        require_buffer(model)
        self._model = model
        k, _ = encoding.blocks[0]
        batch, n_heads, m, width = k.shape
        self._n, self._room, self._capacity = 0, room, m + room
        # Zeros, because rows that were never written must be finite.
        shape = repeats * batch, 2 * n_heads, self._capacity, width  # keys, then values
        self._blocks = [k.new_zeros(shape) for _ in encoding.blocks]
        self._weights = [block.attention.projection_weight(k.dtype, 3) for block in model.blocks]
        self._lengths = torch.empty(len(self._blocks[0]), dtype=torch.int32, device=k.device)
        self._enter = self._entry()
        # The vectors added to the embeddings of an entering point, and of a target.
        self._role = k.new_zeros(len(self._lengths), 2, model.config.d_model)
        self._role[:, 0] = model.embed.role
        self.refill(encoding)

    def refill(self, encoding: Encoding) -> None:
        """Puts another context and an empty buffer into the same memory.

        Raises:
            ValueError: the context has more points than there is room for.
        """
        m = encoding.blocks[0][0].shape[2]
        if m > self._capacity:
            raise ValueError(f"the context has {m} points and there is room for {self._capacity}")
        for kept, new in zip(self._blocks, encoding.blocks, strict=True):
            for whole, x in zip(kept.chunk(2, 1), new, strict=True):
                whole[:, :, :m].unflatten(0, (-1, len(x))).copy_(x)
        if encoding.lengths is None:
            self._lengths.fill_(m)
        else:
            self._lengths.view(-1, encoding.batch).copy_(encoding.lengths)
        self._n, self._room = 0, self._capacity - m

    @torch.no_grad()
    def predict(self, x_target: torch.Tensor, entering: Points | None = None) -> Prediction:
        """Predicts at one target of each sample, and may first add a known point to the buffer.

        Both go through the model together. The point leaves its keys and values.

        Args:
            x_target: [B, 1, d_x], where to predict.
            entering: x [B, 1, d_x] and y [B, 1, d_y] of a point that enters first.

        Raises:
            ValueError: the buffer is full, points have another width, or a sample has more than
                one.
        """
        model = self._model
        x_target = model.prepared_x(x_target)
        self._require_one_each(x_target=x_target)
        if entering is None:
            found = self.alone(x_target)
        else:
            if self._n == self._room:
                raise ValueError(
                    f"the buffer is full: it has room for {self._room} points, and then "
                    "needs a new encoding of a context with these points"
                )
            x, y = model.prepared_context(*entering)
            self._require_one_each(x=x, y=y)
            self._n += 1
            found = self.behind(x_target, x, y)
        return Prediction(found, model.config.sigma_min, model.normalization)

    def _require_one_each(self, **points: torch.Tensor) -> None:
        for name, x in points.items():
            if x.shape[:2] != (len(self._lengths), 1):
                raise ValueError(
                    f"{name} is {tuple(x.shape)}: it must be [{len(self._lengths)}, 1, "
                    f"{x.shape[2]}], one point for each sample of the buffer"
                )

    def _entry(self) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
        """Returns the launch that takes (cache, heads [B, 3 · n_heads, 2, D], lengths).

        It writes keys and values of each sample's first row to place lengths[b] − 1 of the cache.
        """
        cache = self._blocks[0]
        target = devices.of_device(cache.device)
        problem = Problem("cache_entry", str(cache.dtype).removeprefix("torch."), ())
        if triton_from(80)(Call(problem, target)) is None:
            from tnp.ops.kv_cache.append_kernel import entry

            return entry(target, cache, n_rows=2)

        samples = torch.arange(len(cache), device=cache.device)

        def in_torch(cache: torch.Tensor, heads: torch.Tensor, lengths: torch.Tensor) -> None:
            cache[samples, :, lengths - 1] = heads[:, -cache.shape[1] :, 0]

        return in_torch

    def alone(self, x_target: torch.Tensor) -> torch.Tensor:
        """Returns parameters [B, 1, K, 1 + 2·d_y] at x [B, 1, d_x], which sees all points."""
        model = self._model
        h, update = model.embed(None, None, x_target, model.compute_dtype), self._role[:, 1:]
        for block, kept, weight in zip(model.blocks, self._blocks, self._weights, strict=True):
            of_q = weight[: model.config.d_model]
            h, q = block.attention.norm_and_project_cast(h, update, of_q)
            update = block.attention.attend_cache(q, *kept.chunk(2, 1), self._lengths)
            h, update = block.mlp.of_few(h, update)
        return model.heads(h, update)

    def behind(self, x_target: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Returns parameters at x_target after a point enters, x [B, 1, d_x] and y [B, 1, d_y].

        The call waits for nothing and keeps its memory in place, so a graph can replay it. The
        caller must check that there is room.
        """
        model = self._model
        h, update = model.embed(x, y, x_target, model.compute_dtype), self._role
        self._lengths += 1
        for block, kept, weight in zip(model.blocks, self._blocks, self._weights, strict=True):
            h, heads = block.attention.norm_and_project_cast(h, update, weight)
            self._enter(kept, heads, self._lengths)
            # Only the target's row of the last block is read.
            first = 1 if block is model.blocks[-1] else 0
            q = heads[:, : block.attention.n_heads, first:]
            update = block.attention.attend_cache(q, *kept.chunk(2, 1), self._lengths)
            h, update = block.mlp.of_few(h[:, first:], update)
        return model.heads(h, update)


def require_buffer(model: Network) -> None:
    """Raises ValueError if the model has no buffer."""
    if model.config.buffer is None:
        raise ValueError("the model has no buffer: TNPConfig(buffer=…) makes one, to train with it")
