"""Predictions: a Gaussian mixture at every target, from a context that is encoded once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributions import (
    Categorical,
    Distribution,
    Independent,
    MixtureSameFamily,
    Normal,
    constraints,
)

from tnp.captures import Captures
from tnp.decode_graphs import DecodeGraphs
from tnp.inputs import require_one_device, require_real
from tnp.ops.mixture_nll import split_parameters
from tnp.paged_cache import CacheFull, Handle, PagedCache
from tnp.tasks import Context, Task
from tnp.tasks.task import as_lengths, as_points, require_finite

if TYPE_CHECKING:
    from tnp.model import TransformerNP
    from tnp.normalization import Normalization


class Prediction(Distribution):
    """Gaussian mixture over y [B, N, d_y], in the user's units.

    `mean`, `variance`, `stddev`, `log_prob`, `marginal_cdf`, `quantile` and `sample` compute in
    float64 and in the model's units, so that a mean may be far larger than a deviation. Their
    results are float64. NaN among the parameters, or in y, gives NaN at its targets alone.

    `log_prob(y)` is joint over the d_y output dimensions and has shape [B, N]. `sample` draws every
    target by itself, whatever the others came to: for functions that hang together there is
    `TransformerNP.sample_jointly`.
    """

    arg_constraints: dict = {}
    support = constraints.real_vector

    def __init__(
        self,
        parameters: torch.Tensor,
        sigma_min: float = 0.0,
        normalization: Normalization | None = None,
    ) -> None:
        """Takes parameters [B, N, K, 1 + 2·d_y] in the model's units, as its heads give them."""
        self._given = parameters, sigma_min
        # The tensors themselves: the model may be moved before they are read.
        self._units = normalization and (
            normalization.y_mean, normalization.y_deviation, normalization.log_volume
        )  # fmt: skip
        *batch, _, width = parameters.shape
        shapes = torch.Size(batch), torch.Size([(width - 1) // 2])
        super().__init__(*shapes, validate_args=False)  # NaN in, NaN out

    @cached_property
    def standardized(self) -> MixtureSameFamily:
        """The mixture over y in the model's units, float64."""
        parameters, sigma_min = self._given
        logits, mu, log_sigma = split_parameters(parameters.double(), sigma_min)
        weights = Categorical(logits=logits, validate_args=False)
        normal = Independent(Normal(mu, log_sigma.exp(), validate_args=False), 1)
        return MixtureSameFamily(weights, normal, validate_args=False)

    @property
    def mean(self) -> torch.Tensor:
        """E[Y] of every target, [B, N, d_y]."""
        return self._of_user(self.standardized.mean)

    @property
    def variance(self) -> torch.Tensor:
        """Var[Y] of every output dimension, [B, N, d_y]; `stddev` is its root."""
        variance = self.standardized.variance
        return variance if self._units is None else variance * self._units[1].square()

    @property
    def stddev(self) -> torch.Tensor:
        deviation = self.standardized.stddev
        return deviation if self._units is None else deviation * self._units[1]

    def log_prob(self, y: torch.Tensor | np.ndarray) -> torch.Tensor:
        """log p(y) in nats of y [..., B, N, d_y], shape [..., B, N].

        Raises:
            ValueError: y has another shape.
        """
        log_prob = self.standardized.log_prob(self._of_model(y))
        return log_prob if self._units is None else log_prob - self._units[2]

    def marginal_cdf(self, y: torch.Tensor | np.ndarray) -> torch.Tensor:
        """P(Y ≤ y) of every output dimension by itself, for y and in the shape [..., B, N, d_y].

        Raises:
            ValueError: y has another shape.
        """
        return self._cdf(self._of_model(y))

    def quantile(self, probability: float) -> torch.Tensor:
        """The y [B, N, d_y] with marginal P(Y ≤ y) = `probability`, by bisection of the CDF."""
        p = require_real("probability", probability)
        if not 0.0 < p < 1.0:
            raise ValueError(f"probability is {probability!r}: it must be a number between 0 and 1")
        # A mixture's quantile lies between the smallest and the largest of its components'.
        normal = self._normal
        ends = normal.loc + normal.scale * torch.special.ndtri(torch.full_like(normal.loc, p))
        low, high = ends.amin(-2), ends.amax(-2)
        for _ in range(60):  # halves the bracket below float64's resolution
            middle = 0.5 * (low + high)
            below = self._cdf(middle) < p
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return self._of_user(0.5 * (low + high))

    def sample(self, sample_shape: torch.Size = torch.Size()) -> torch.Tensor:  # noqa: B008
        """Draws of every target by itself, [*sample_shape, B, N, d_y]."""
        return self._of_user(self.standardized.sample(sample_shape)).detach()

    @property
    def _normal(self) -> Normal:
        """The components, [B, N, K, d_y]."""
        return self.standardized.component_distribution.base_dist

    def _cdf(self, y: torch.Tensor) -> torch.Tensor:
        weights = self.standardized.mixture_distribution.probs.unsqueeze(-1)
        z = (y.unsqueeze(-2) - self._normal.loc) / self._normal.scale
        return (weights * torch.special.ndtr(z)).sum(-2)

    def _of_user(self, y: torch.Tensor) -> torch.Tensor:
        if self._units is None:
            return y
        mean, deviation, _ = self._units
        return torch.addcmul(mean, y, deviation)

    def _of_model(self, y: torch.Tensor | np.ndarray) -> torch.Tensor:
        """y in the model's units, float64; raises ValueError or TypeError where it is no y."""
        parameters, _ = self._given
        if isinstance(y, np.ndarray) and y.dtype.kind in "fiu":
            values = np.ma.filled(y.astype(np.float64), np.nan)
            y = torch.as_tensor(values, device=parameters.device)
        if not isinstance(y, torch.Tensor) or y.is_complex():
            what = f"holds {y.dtype}" if hasattr(y, "dtype") else f"is a {type(y).__name__}"
            raise TypeError(f"y {what}: it must be a tensor or an array of real numbers")
        shape = self._extended_shape()
        if y.shape[-len(shape) :] != shape:
            raise ValueError(f"y is {list(y.shape)}: it must be {list(shape)}, B, N and d_y")
        require_one_device(y=y, prediction=parameters)
        if self._units is None:
            return y.double()
        mean, deviation, _ = self._units
        return (y.double() - mean) / deviation


def draw(
    parameters: torch.Tensor,
    gumbel: torch.Tensor,
    normal: torch.Tensor,
    sigma_min: float = 0.0,
    normalization: Normalization | None = None,
) -> torch.Tensor:
    """A sample [B, N, d_y] of the `Prediction` of these parameters, made of noise.

    The component is the one whose logit and number are the largest together. It is taken first, so
    that the rest is done for one in place of K: each line here is a launch of every draw.

    Args:
        parameters, sigma_min, normalization: as of `Prediction`.
        gumbel: [B, N, K], standard Gumbel numbers.
        normal: [B, N, d_y], standard normal ones, that the deviation is multiplied by.
    """
    chosen = (parameters[..., 0] + gumbel).argmax(-1, keepdim=True)[..., None]
    parameters = parameters.take_along_dim(chosen, -2).squeeze(-2)
    _, mu, log_sigma = split_parameters(parameters, sigma_min)
    y = torch.addcmul(mu, log_sigma.exp(), normal)
    return y if normalization is None else normalization.y_of_user(y)


@dataclass(frozen=True)
class Encoding:
    """What targets read of a context: keys and values of every block, [B, n_heads, M, D] each.

    Beside them lie the weights that make queries, as `Attention.projection_weight` gives them. All
    of it is of the model's weights as they were: where these have changed, encode anew.
    """

    blocks: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    queries: tuple[torch.Tensor, ...]
    lengths: torch.Tensor | None  # of the context's samples
    graphs: DecodeGraphs | None = None  # where predictions are to be replayed

    @property
    def batch(self) -> int:
        return len(self.blocks[0][0])

    def to_pages(self, cache: PagedCache) -> list[Handle]:
        """Copies keys and values to pages, where `decode_attention` reads them and they may grow.

        It waits for the device where samples have lengths of their own.

        Args:
            cache: of as many layers as there are blocks, and of these heads, width and dtype.

        Returns:
            A sequence of the cache for each sample.

        Raises:
            ValueError: the cache is of other sizes.
            CacheFull: there are not as many pages; nothing was changed.
        """
        if cache.n_layers != len(self.blocks):
            raise ValueError(
                f"the cache has {cache.n_layers} layers and the encoding {len(self.blocks)}: they "
                "must have as many"
            )
        n_keys = self.blocks[0][0].shape[2]
        lengths = [n_keys] * self.batch if self.lengths is None else self.lengths.tolist()
        handles: list[Handle] = []
        try:
            for length in lengths:
                handles.append(cache.allocate(length))
            for layer, (k, v) in enumerate(self.blocks):
                for b, (handle, n) in enumerate(zip(handles, lengths, strict=True)):
                    cache.append(handle, k[b, :, :n], v[b, :, :n], layer)
        except (CacheFull, ValueError):
            for handle in handles:
                cache.free(handle)
            raise
        return handles

    def decode(self, model: TransformerNP, x_target: torch.Tensor) -> torch.Tensor:
        """Mixture parameters [B, N, K, 1 + 2·d_y] at x_target [B, N, d_x] in the model's units."""
        if self.graphs is None:
            return decode(model, self, x_target)
        return self.graphs(lambda x: decode(model, self, x), x_target)


def as_context(model: TransformerNP, context: Context) -> Context:
    """Returns the context as tensors, arrays moved to the model's device.

    Raises:
        TypeError: it is no `Context`, or holds what is no array.
        ValueError: its values are no floats, or on the CPU one is infinite, missing or too large.
    """
    if isinstance(context, Task):
        raise TypeError("context is a Task: give its context, task.context")
    if not isinstance(context, Context):
        raise TypeError(
            f"context is a {type(context).__name__}: it must be a tnp.tasks.Context, such as "
            "task.context"
        )
    x, y = (as_points(f"{of}_context", getattr(context, of)) for of in "xy")
    lengths = context.lengths
    if x.dim() == 3:  # else `check_context` says what it must be
        lengths = as_lengths("context_lengths", lengths, *x.shape[:2])
    model.check_context(x, y, lengths)
    for name, values in (("x_context", x), ("y_context", y)):
        require_on_host(model, name, values, lengths)
    x, y = on_device(model, "x_context", context.x), on_device(model, "y_context", context.y)
    require_one_device(x_context=x, y_context=y)
    is_given = lengths is None or isinstance(context.lengths, torch.Tensor)
    return Context(x, y, lengths if is_given else lengths.to(x.device))


def on_device(model: TransformerNP, name: str, values: Any) -> torch.Tensor:
    """Returns a tensor as it is, and an array as a tensor where the model is."""
    if isinstance(values, torch.Tensor):
        return values
    return as_points(name, values).to(next(model.parameters()).device)


def require_on_host(
    model: TransformerNP, name: str, values: torch.Tensor, lengths: torch.Tensor | None
) -> None:
    """Raises ValueError where points on the CPU are not finite or too large for the model.

    Points on a GPU pass, because a look at them would wait for it.
    """
    if values.device.type != "cpu":
        return
    is_host = next(model.parameters()).device.type == "cpu"
    units = model.units if is_host else model.units.on_host()
    require_finite(name, values, lengths, units)


def encode(model: TransformerNP, context: Context, cuda_graph: bool = False) -> Encoding:
    """The context's way through the blocks, in which no target has a part."""
    context = as_context(model, context)
    x, y = model.prepared_context(*context)
    if cuda_graph and x.device.type != "cuda":
        raise RuntimeError(f"a CUDA graph needs a CUDA device: the context is on {x.device}")
    dtype = model.compute_dtype
    h, update, blocks, queries = model.embed(x, y, None, dtype), None, [], []
    for block in model.blocks:
        h, x = block.attention.norm(h, update)
        q, k, v = block.attention.project(x, n_keys=context.lengths)
        blocks.append((k, v))
        queries.append(block.attention.projection_weight(dtype, 1))
        if block is not model.blocks[-1]:  # of the last, targets read keys and values alone
            h, update = block.mlp(h, block.attention.attend(q, k, v, context.lengths))
    graphs = DecodeGraphs(model.parameters(), Captures(x.device)) if cuda_graph else None
    return Encoding(tuple(blocks), tuple(queries), context.lengths, graphs)


def decode(model: TransformerNP, encoding: Encoding, x_target: torch.Tensor) -> torch.Tensor:
    """The targets' way through the blocks; no key or value is made of them."""
    h, update = model.embed(None, None, x_target, model.compute_dtype), None
    of_blocks = zip(model.blocks, encoding.blocks, encoding.queries, strict=True)
    for block, (k, v), weight in of_blocks:
        h, x = block.attention.norm(h, update)
        q = block.attention.project_cast(x, weight)
        h, update = block.mlp(h, block.attention.attend(q, k, v, encoding.lengths))
    return model.heads(h, update)


def bytes_per_target(model: TransformerNP) -> int:
    """Roughly what one target takes while it is predicted.

    A block's stream, norm, queries, attention and hidden layer, and those of all heads.
    """
    config = model.config
    n = 6 * config.d_model + (2 + config.n_components) * model.heads.width
    return n * model.compute_dtype.itemsize
