"""The Transformer Neural Process: from context points to a Gaussian mixture at every target.

Every row, context and target alike, is a query; only the context rows are keys and values
(rectangular attention), so no mask is ever built and targets never see one another. Blocks are
pre-norm with RMSNorm, SiLU, no bias, no dropout, no positional encoding (Nguyen and Grover,
Transformer Neural Processes, arXiv 2207.04179; the mixture head replaces its single Gaussian).

Parameters are float32 in every variant and are cast to `compute_dtype` for every step:
AdamW's updates are some 1e-4 of a weight, and bfloat16 resolves 4e-3, so weights held in bfloat16
alone would drop most of them. The cast costs under 1 % of a step at the shapes measured.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tnp.inputs import require_count
from tnp.opaque import custom_op
from tnp.ops.attention import OPERATOR as attention_operator
from tnp.ops.attention import attention
from tnp.ops.embedding import embed_rows
from tnp.ops.mixture_heads import mixture_heads
from tnp.ops.mixture_nll import mixture_nll
from tnp.ops.mlp import mlp
from tnp.ops.projection import linear, project_qkv
from tnp.ops.rms_norm import add_rms_norm, rms_norm
from tnp.prediction import Prediction
from tnp.tasks import Task
from tnp.variants import Variant

NORM_EPS = 1e-6


@dataclass(frozen=True)
class TNPConfig:
    """Sizes of the model; the defaults are the specification's. `sigma_min` is in units of y."""

    d_x: int = 1
    d_y: int = 1
    d_model: int = 512
    n_layers: int = 12
    n_heads: int = 8
    d_ff: int = 1365
    n_components: int = 10
    sigma_min: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "sigma_min":
                require_count(name, value, at_least=1)
        if self.d_model % self.n_heads:
            raise ValueError(
                f"d_model {self.d_model} is not a multiple of n_heads {self.n_heads}: "
                "each head takes an equal share"
            )
        if not 0 <= self.sigma_min < math.inf:
            raise ValueError(f"sigma_min is {self.sigma_min}: it must be finite and not negative")


def _parameter(*shape: int, fan_in: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * (gain / math.sqrt(fan_in)))


def _pad(weight: nn.Parameter, dim: int, width: int) -> nn.Parameter:
    """Zero-pad a hidden width. Exact: SiLU(0) = 0, and zeros stay zero through AdamW."""
    padding = list(weight.shape)
    padding[dim] = width - weight.shape[dim]
    return nn.Parameter(torch.cat([weight.detach(), weight.new_zeros(padding)], dim))


class RMSNorm(nn.Module):
    """The norm ahead of a layer, which first adds what the layer before left to be added."""

    def __init__(self, config: TNPConfig, variant: Variant) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.d_model))
        self.implementation = variant.rms_norm

    def forward(
        self, h: torch.Tensor, update: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """h + update and its norm, all [B, L, d_model]."""
        options = {"eps": NORM_EPS, "implementation": self.implementation}
        if update is None:
            return h, rms_norm(h, self.weight, **options)
        return add_rms_norm(h, update, self.weight, **options)


class Embedding(nn.Module):
    """(x, y, target flag) → d_model: linear, SiLU, linear.

    The flag is −1 for context and +1 for targets, whose y is 0: never zero, it doubles as the bias
    the linear layers lack. The first layer runs in float32, because bfloat16 cannot tell
    neighbouring pixels of a 512-pixel row apart.
    """

    def __init__(self, config: TNPConfig, variant: Variant) -> None:
        super().__init__()
        d_in = config.d_x + config.d_y + 1
        self.input = _parameter(config.d_model, d_in, fan_in=d_in)
        self.output = _parameter(config.d_model, config.d_model, fan_in=config.d_model)
        self.variant = variant

    def forward(
        self,
        x_context: torch.Tensor | None,
        y_context: torch.Tensor | None,
        x_target: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """x [B, rows, d_x], y_context [B, M, d_y] → [B, M + N, d_model] in `dtype`.

        Without context both its tensors are None, without targets theirs.
        """
        hidden = embed_rows(
            x_context, y_context, x_target, self.input, dtype, implementation=self.variant.embedding
        )
        return linear(hidden, self.output, implementation=self.variant.projection)


class Attention(nn.Module):
    """Pre-norm attention."""

    def __init__(self, config: TNPConfig, variant: Variant) -> None:
        super().__init__()
        d_model = config.d_model
        self.n_heads = config.n_heads
        self.variant = variant
        self.norm = RMSNorm(config, variant)
        self.qkv = _parameter(3 * d_model, d_model, fan_in=d_model)
        self.output = _parameter(
            d_model, d_model, fan_in=d_model, gain=(2 * config.n_layers) ** -0.5
        )

    def project(
        self, x: torch.Tensor, n_k: int | None = None, first: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q of the rows from `first` on, k and v of `n_k` rows (all), [B, n_heads, rows, D]."""
        return project_qkv(
            x, self.qkv, self.n_heads, n_k=n_k, first=first,
            implementation=self.variant.projection,
        )  # fmt: skip

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The update of the rows that q belongs to."""
        o = attention(q, k, v, implementation=self.variant.attention)
        o = o.transpose(1, 2).flatten(-2)
        return linear(o, self.output, implementation=self.variant.projection)

    def forward(
        self, h: torch.Tensor, update: torch.Tensor | None, n_context: int, first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """h + update of the rows from `first` on, and what attention adds to them."""
        h, x = self.norm(h, update)
        if self.variant.skip_unread:
            q, k, v = self.project(x, n_context, first)
        else:
            q, k, v = self.project(x)
            k, v = k[:, :, :n_context], v[:, :, :n_context]
        # The gradient of a slice is a copy of the whole, even where nothing is cut off.
        return h[:, first:] if first else h, self.attend(q, k, v)


class MLP(nn.Module):
    """Pre-norm GEMM, SiLU, GEMM."""

    def __init__(self, config: TNPConfig, variant: Variant) -> None:
        super().__init__()
        d_model, d_ff = config.d_model, config.d_ff
        self.norm = RMSNorm(config, variant)
        up = _parameter(d_ff, d_model, fan_in=d_model)
        down = _parameter(d_model, d_ff, fan_in=d_ff, gain=(2 * config.n_layers) ** -0.5)
        self.up = _pad(up, 0, variant.d_ff_storage or d_ff)
        self.down = _pad(down, 1, variant.d_ff_storage or d_ff)
        self.implementation = variant.mlp

    def forward(self, h: torch.Tensor, update: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """h + update, and what the MLP adds to it."""
        h, x = self.norm(h, update)
        return h, mlp(x, self.up, self.down, implementation=self.implementation)


class MixtureHeads(nn.Module):
    """One MLP d_model → d_ff → 1 + 2·d_y for every mixture component."""

    def __init__(self, config: TNPConfig, variant: Variant) -> None:
        super().__init__()
        n, d_model, d_ff = config.n_components, config.d_model, config.d_ff
        self.norm = RMSNorm(config, variant)
        up = _parameter(n, d_ff, d_model, fan_in=d_model)
        down = _parameter(n, 1 + 2 * config.d_y, d_ff, fan_in=d_ff)
        self.up = _pad(up, 1, variant.d_ff_storage or d_ff)
        self.down = _pad(down, 2, variant.d_ff_storage or d_ff)
        self.implementation = variant.mixture_heads

    def forward(self, h: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """[B, N, d_model] → logit_weight, mu, log_sigma [B, N, K, 1 + 2·d_y]."""
        _, x = self.norm(h, update)
        return mixture_heads(x, self.up, self.down, implementation=self.implementation)


class Block(nn.Module):
    def __init__(self, config: TNPConfig, variant: Variant) -> None:
        super().__init__()
        self.attention = Attention(config, variant)
        self.mlp = MLP(config, variant)

    def forward(
        self, h: torch.Tensor, update: torch.Tensor | None, n_context: int, first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream of the rows from `first` on, and what is still to be added to it.

        Each layer leaves its addition to the next norm, which reads the stream anyway.
        """
        return self.mlp(*self.attention(h, update, n_context, first))


@cache
def _attention_operators() -> frozenset[torch._ops.OpOverload]:
    """Forward passes of attention as PyTorch sees them: ours, and those that its forms dispatch."""
    names = [
        name.partition("::")[2]
        for implementation in attention_operator.implementations
        for name in implementation.dispatches
    ]
    theirs = {getattr(torch.ops.aten, name).default for name in names}
    return frozenset({custom_op(attention_operator), *theirs})


def _keep_attention(ctx, operator, *args, **kwargs) -> CheckpointPolicy:
    """What a block keeps where only attention is too expensive to compute again."""
    if operator in _attention_operators():
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class TransformerNP(nn.Module):
    """The model of the specification, run as `variant` says.

    Args:
        config: sizes.
        variant: implementation of each operator; weights and results do not depend on it.
        compute_dtype: dtype of activations and matmuls; parameters are float32.
        checkpoint: recompute each block in the backward pass instead of keeping its activations.
    """

    def __init__(
        self,
        config: TNPConfig,
        variant: Variant,
        compute_dtype: torch.dtype = torch.bfloat16,
        checkpoint: bool = False,
    ) -> None:
        super().__init__()
        if variant.d_ff_storage is not None and variant.d_ff_storage < config.d_ff:
            raise ValueError(
                f"variant {variant.name!r} stores d_ff_storage {variant.d_ff_storage}: it must be "
                f"at least d_ff {config.d_ff}"
            )
        self.config = config
        self.variant = variant
        self.compute_dtype = compute_dtype
        self.checkpoint = checkpoint
        self.embed = Embedding(config, variant)
        self.blocks = nn.ModuleList(Block(config, variant) for _ in range(config.n_layers))
        self.heads = MixtureHeads(config, variant)

    def forward(
        self, x_context: torch.Tensor, y_context: torch.Tensor, x_target: torch.Tensor
    ) -> torch.Tensor:
        """Mixture parameters at every target, [B, N, K, 1 + 2·d_y], as the heads give them.

        In `compute_dtype` from PyTorch's heads, in float32 from ours.

        Args:
            x_context: [B, M, d_x].
            y_context: [B, M, d_y].
            x_target: [B, N, d_x].
        """
        self._check(x_context, y_context, x_target)
        n_context = x_context.shape[1]
        h, update = self.embed(x_context, y_context, x_target, self.compute_dtype), None
        run = self._recomputing(h.shape[0] * h.shape[1])
        for index, block in enumerate(self.blocks):
            # Of the last block only the targets reach the loss.
            last = index == len(self.blocks) - 1
            first = n_context if last and self.variant.skip_unread else 0
            if run is None:
                h, update = block(h, update, n_context, first)
            else:  # what a block is given is kept: one tensor, not two
                h, update = run(block, h, update, n_context, first)
                h, update = h + update, None
        if not self.variant.skip_unread:
            h = h[:, n_context:]
            update = None if update is None else update[:, n_context:]
        return self.heads(h, update)

    def _check(
        self, x_context: torch.Tensor, y_context: torch.Tensor, x_target: torch.Tensor
    ) -> None:
        """Raises ValueError where they are no task of this model's dimensions."""
        d_x, d_y = self.config.d_x, self.config.d_y
        named = (("x_context", x_context, d_x), ("y_context", y_context, d_y))
        for name, x, width in (*named, ("x_target", x_target, d_x)):
            if x.dim() != 3 or x.shape[-1] != width:
                raise ValueError(
                    f"{name} is {tuple(x.shape)}: it must be [B, rows, {width}], by TNPConfig's "
                    f"d_x {d_x} and d_y {d_y}"
                )
        if x_target.shape[1] == 0:
            raise ValueError(
                f"x_target is {tuple(x_target.shape)}: it must hold at least one target"
            )

    def _recomputing(self, n_rows: int) -> Callable | None:
        """How to run a block whose activations are not all kept; None where they are."""
        if self.checkpoint:
            return partial(checkpoint, use_reentrant=False)
        above = self.variant.recompute_above
        if above is not None and n_rows > above:
            contexts = partial(create_selective_checkpoint_contexts, _keep_attention)
            return partial(checkpoint, use_reentrant=False, context_fn=contexts)
        return None

    def loss(self, task: Task) -> torch.Tensor:
        """Mean negative log-likelihood per target in nats, a float32 scalar."""
        return self.nll(task.x_context, task.y_context, task.x_target, task.y_target)

    def nll(
        self,
        x_context: torch.Tensor,
        y_context: torch.Tensor,
        x_target: torch.Tensor,
        y_target: torch.Tensor,
    ) -> torch.Tensor:
        """The loss of the four tensors of a task: what `torch.compile` is given."""
        parameters = self(x_context, y_context, x_target)
        return mixture_nll(
            parameters, y_target, self.config.sigma_min, implementation=self.variant.mixture_nll
        )

    @torch.no_grad()
    def predict(self, task: Task, max_targets: int = 16_384) -> Prediction:
        """The predictive distribution at the task's targets; its y_target is not read.

        The context runs through the blocks once and its keys and values are kept; targets, which
        never see one another, follow in chunks of at most `max_targets`.
        """
        if max_targets < 1:
            raise ValueError(f"max_targets is {max_targets}: it must be at least 1")
        self._check(task.x_context, task.y_context, task.x_target)
        h = self.embed(task.x_context, task.y_context, None, self.compute_dtype)
        update, context = None, []
        for block in self.blocks:
            h, x = block.attention.norm(h, update)
            q, k, v = block.attention.project(x)
            context.append((k, v))
            if block is not self.blocks[-1]:  # of the last, targets read keys and values alone
                h, update = block.mlp(h, block.attention.attend(q, k, v))
        chunks = []
        for x_target in task.x_target.split(max_targets, dim=1):
            h, update = self.embed(None, None, x_target, self.compute_dtype), None
            for block, (k, v) in zip(self.blocks, context, strict=True):
                h, x = block.attention.norm(h, update)
                q, _, _ = block.attention.project(x, n_k=1)
                h, update = block.mlp(h, block.attention.attend(q, k, v))
            chunks.append(self.heads(h, update))
        return Prediction(torch.cat(chunks, dim=1), self.config.sigma_min)
