"""Predicts a Gaussian mixture at every target, from a context that is encoded once."""

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

from tnp.cuda_graphs import Captures
from tnp.model.prediction_graphs import DecodeGraphs
from tnp.ops.kv_cache.paged import CacheFull, Handle, PagedCache
from tnp.ops.mixture_nll import split_parameters
from tnp.tasks.task import Context, Task, as_lengths, as_points, require_finite
from tnp.util.checks import require_count, require_one_device, require_real

if TYPE_CHECKING:
    from tnp.model.network import Network
    from tnp.tasks.normalization import Normalization


class Prediction(Distribution):
    """Represents a Gaussian mixture over y [B, N, d_y], in the user's units.

    All results are float64. They are computed in the model's units, so that a mean may be far
    larger than a deviation. A NaN in the parameters or in y gives NaN at its own target only.

    `log_prob(y)` is joint over the d_y output dimensions and has shape [B, N]. `sample` draws every
    target independently of the others. `TransformerNP.sample_jointly` draws coherent functions.
    """

    arg_constraints: dict = {}
    support = constraints.real_vector

    def __init__(
        self,
        parameters: torch.Tensor,
        sigma_min: float = 0.0,
        normalization: Normalization | None = None,
    ) -> None:
        """Takes parameters [B, N, K, 1 + 2·d_y] in the model's units, as the heads return them."""
        self._given = parameters, sigma_min
        # Keeps the tensors themselves: the model may be moved before they are read.
        self._units = normalization and (
            normalization.y_mean, normalization.y_deviation, normalization.log_volume
        )  # fmt: skip
        *batch, _, width = parameters.shape
        shapes = torch.Size(batch), torch.Size([(width - 1) // 2])
        super().__init__(*shapes, validate_args=False)  # a NaN must give NaN, not an error

    @cached_property
    def standardized(self) -> MixtureSameFamily:
        """Returns the mixture over y in the model's units, float64."""
        parameters, sigma_min = self._given
        logits, mu, log_sigma = split_parameters(parameters.double(), sigma_min)
        weights = Categorical(logits=logits, validate_args=False)
        normal = Independent(Normal(mu, log_sigma.exp(), validate_args=False), 1)
        return MixtureSameFamily(weights, normal, validate_args=False)

    @property
    def mean(self) -> torch.Tensor:
        """Returns E[Y] of every target, [B, N, d_y]."""
        return self._of_user(self.standardized.mean)

    @property
    def variance(self) -> torch.Tensor:
        """Returns Var[Y] of every output dimension, [B, N, d_y]. `stddev` is its root."""
        variance = self.standardized.variance
        return variance if self._units is None else variance * self._units[1].square()

    @property
    def stddev(self) -> torch.Tensor:
        deviation = self.standardized.stddev
        return deviation if self._units is None else deviation * self._units[1]

    def log_prob(self, y: torch.Tensor | np.ndarray) -> torch.Tensor:
        """Returns log p(y) in nats, [..., B, N], for y [..., B, N, d_y].

        Raises:
            ValueError: y has another shape.
        """
        log_prob = self.standardized.log_prob(self._of_model(y))
        return log_prob if self._units is None else log_prob - self._units[2]

    def marginal_cdf(self, y: torch.Tensor | np.ndarray) -> torch.Tensor:
        """Returns P(Y ≤ y) of each output dimension by itself, [..., B, N, d_y], for y of that
        shape.

        Raises:
            ValueError: y has another shape.
        """
        return self._cdf(self._of_model(y))

    def quantile(self, probability: float) -> torch.Tensor:
        """Returns the y [B, N, d_y] with marginal P(Y ≤ y) = `probability`, by bisection.

        Raises:
            ValueError: `probability` is not between 0 and 1.
        """
        p = require_real("probability", probability)
        if not 0.0 < p < 1.0:
            raise ValueError(f"probability is {probability!r}: it must be a number between 0 and 1")
        # A mixture's quantile lies between the smallest and the largest quantile of its components.
        normal = self._normal
        ends = normal.loc + normal.scale * torch.special.ndtri(torch.full_like(normal.loc, p))
        low, high = ends.amin(-2), ends.amax(-2)
        for _ in range(60):  # halves the bracket below float64's resolution
            middle = 0.5 * (low + high)
            below = self._cdf(middle) < p
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return self._of_user(0.5 * (low + high))

    def sample(self, sample_shape: torch.Size = torch.Size()) -> torch.Tensor:  # noqa: B008
        """Returns independent draws at every target, [*sample_shape, B, N, d_y]."""
        return self._of_user(self.standardized.sample(sample_shape)).detach()

    @property
    def _normal(self) -> Normal:
        """Returns the components, [B, N, K, d_y]."""
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
        """Returns y in the model's units, float64.

        Raises:
            TypeError: y is no tensor or array of real numbers.
            ValueError: y has another shape, or is on another device.
        """
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
    """Returns a sample [B, N, d_y] of the `Prediction` of these parameters, from given noise.

    It chooses the component whose logit plus Gumbel number is the largest. Later lines then compute
    one component in place of K: each line is a launch for every draw.

    Args:
        parameters, sigma_min, normalization: the arguments of `Prediction`.
        gumbel: [B, N, K], standard Gumbel numbers.
        normal: [B, N, d_y], standard normal numbers, which are multiplied by the deviation.
    """
    chosen = (parameters[..., 0] + gumbel).argmax(-1, keepdim=True)[..., None]
    parameters = parameters.take_along_dim(chosen, -2).squeeze(-2)
    _, mu, log_sigma = split_parameters(parameters, sigma_min)
    y = torch.addcmul(mu, log_sigma.exp(), normal)
    return y if normalization is None else normalization.y_of_user(y)


@dataclass(frozen=True)
class Encoding:
    """Holds an encoded context: keys and values of every block, [B, n_heads, M, D] each.

    It also holds the weights that make queries, from `Attention.projection_weight`. It belongs to
    the model's weights at the time of encoding: encode again after they change.
    """

    blocks: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    queries: tuple[torch.Tensor, ...]
    lengths: torch.Tensor | None  # context points of each sample
    graphs: DecodeGraphs | None = None  # CUDA graphs that replay predictions, if asked for

    @property
    def batch(self) -> int:
        return len(self.blocks[0][0])

    def to_pages(self, cache: PagedCache) -> list[Handle]:
        """Copies keys and values to pages, where `decode_attention` reads them and they may grow.

        If the encoding has `lengths`, the call waits for the device.

        Args:
            cache: has a layer for each block, and the model's heads, head width and dtype.

        Returns:
            A handle for each sample's sequence in the cache.

        Raises:
            ValueError: the cache has other sizes.
            CacheFull: the cache has too few free pages. Nothing was changed.
        """
        if cache.n_layers != len(self.blocks):
            raise ValueError(
                f"the cache has {cache.n_layers} layers and the encoding {len(self.blocks)}: they "
                "must have equally many"
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

    def decode(self, model: Network, x_target: torch.Tensor) -> torch.Tensor:
        """Returns parameters [B, N, K, 1 + 2·d_y] at x_target [B, N, d_x], in the model's units."""
        if self.graphs is None:
            return decode(model, self, x_target)
        return self.graphs(lambda x: decode(model, self, x), x_target)


def as_context(model: Network, context: Context) -> Context:
    """Returns the context as tensors, and moves arrays to the model's device.

    Raises:
        TypeError: `context` is no `Context`, or a field is no array or tensor.
        ValueError: values are no floats, or a value on the CPU is infinite, missing or too large.
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
    if x.dim() == 3:  # `check_context` refuses other shapes
        lengths = as_lengths("context_lengths", lengths, *x.shape[:2])
    model.check_context(x, y, lengths)
    for name, values in (("x_context", x), ("y_context", y)):
        require_on_host(model, name, values, lengths)
    x, y = on_device(model, "x_context", context.x), on_device(model, "y_context", context.y)
    require_one_device(x_context=x, y_context=y)
    is_given = lengths is None or isinstance(context.lengths, torch.Tensor)
    return Context(x, y, lengths if is_given else lengths.to(x.device))


def on_device(model: Network, name: str, values: Any) -> torch.Tensor:
    """Returns a tensor unchanged, and an array as a tensor on the model's device."""
    if isinstance(values, torch.Tensor):
        return values
    return as_points(name, values).to(next(model.parameters()).device)


def require_on_host(
    model: Network, name: str, values: torch.Tensor, lengths: torch.Tensor | None
) -> None:
    """Raises ValueError where points on the CPU are not finite or too large for the model.

    Points on a GPU pass, because reading them would wait for the GPU.
    """
    if values.device.type != "cpu":
        return
    is_host = next(model.parameters()).device.type == "cpu"
    units = model.units if is_host else model.units.on_host()
    require_finite(name, values, lengths, units)


def encode(model: Network, context: Context, cuda_graph: bool = False) -> Encoding:
    """Runs the context through the blocks, without targets, and returns its `Encoding`.

    Raises:
        RuntimeError: `cuda_graph` is True, and the context is not on a CUDA device.
    """
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
        if block is not model.blocks[-1]:  # targets read only keys and values of the last block
            h, update = block.mlp(h, block.attention.attend(q, k, v, context.lengths))
    graphs = DecodeGraphs(model.parameters(), Captures(x.device)) if cuda_graph else None
    return Encoding(tuple(blocks), tuple(queries), context.lengths, graphs)


def predict(
    model: Network, context: Context | Encoding, x_target: torch.Tensor, max_bytes: int = 1 << 30
) -> Prediction:
    """Predicts at targets [B, N, d_x] in chunks that take at most `max_bytes` of memory each."""
    max_bytes = require_count("max_bytes", max_bytes, at_least=1)
    encoding = context if isinstance(context, Encoding) else encode(model, context)
    x_target = model.prepared_x(on_device(model, "x_target", x_target))
    if x_target.shape[0] != encoding.batch:
        raise ValueError(
            f"x_target has {x_target.shape[0]} samples and the context {encoding.batch}: they "
            "must have equally many"
        )
    chunk = max_bytes // (encoding.batch * bytes_per_target(model))
    parts = [encoding.decode(model, x) for x in x_target.split(max(1, chunk), dim=1)]
    parameters = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return Prediction(parameters, model.config.sigma_min, model.normalization)


def decode(model: Network, encoding: Encoding, x_target: torch.Tensor) -> torch.Tensor:
    """Runs targets, only as queries, through the blocks; returns what `Encoding.decode` does."""
    h, update = model.embed(None, None, x_target, model.compute_dtype), None
    of_blocks = zip(model.blocks, encoding.blocks, encoding.queries, strict=True)
    for block, (k, v), weight in of_blocks:
        h, x = block.attention.norm(h, update)
        q = block.attention.project_cast(x, weight)
        h, update = block.mlp(h, block.attention.attend(q, k, v, encoding.lengths))
    return model.heads(h, update)


def bytes_per_target(model: Network) -> int:
    """Returns roughly how many bytes of memory the prediction of one target takes.

    It counts a block's stream, norm, queries, attention and hidden layer, and the mixture heads.
    """
    config = model.config
    n = 6 * config.d_model + (2 + config.n_components) * model.heads.width
    return n * model.compute_dtype.itemsize
