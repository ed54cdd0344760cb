"""The Transformer Neural Process: from context points to a Gaussian mixture at every target.

Every row, context and target alike, is a query; only the context rows are keys and values
(rectangular attention), so no mask is ever built and targets never see one another. Blocks are
pre-norm with RMSNorm, SiLU, no bias, no dropout, no positional encoding (Nguyen and Grover,
Transformer Neural Processes, arXiv 2207.04179; the mixture head replaces its single Gaussian).

Parameters are float32 in every variant and are cast to `compute_dtype` where they are used:
AdamW's updates are some 1e-4 of a weight, and bfloat16 resolves 4e-3, so weights held in bfloat16
alone would drop most of them. The cast costs under 1 % of a step at the shapes measured.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tnp.ops.attention import attention
from tnp.ops.mixture_nll import mixture_nll
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
            if name != "sigma_min" and value < 1:
                raise ValueError(f"{name} is {value}: it must be at least 1")
        if self.d_model % self.n_heads:
            raise ValueError(
                f"d_model {self.d_model} is not a multiple of n_heads {self.n_heads}: "
                "each head takes an equal share"
            )
        if self.sigma_min < 0:
            raise ValueError(f"sigma_min is {self.sigma_min}: it must not be negative")


def _parameter(*shape: int, fan_in: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * (gain / math.sqrt(fan_in)))


def _pad(weight: nn.Parameter, dim: int, width: int) -> nn.Parameter:
    """Zero-pad a hidden width. Exact: SiLU(0) = 0, and zeros stay zero through AdamW."""
    padding = list(weight.shape)
    padding[dim] = width - weight.shape[dim]
    return nn.Parameter(torch.cat([weight.detach(), weight.new_zeros(padding)], dim))


def _linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight.to(x.dtype))


class RMSNorm(nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), NORM_EPS)


class Embedding(nn.Module):
    """(x, y, target flag) → d_model: linear, SiLU, linear.

    The flag is −1 for context and +1 for targets, whose y is 0: never zero, it doubles as the bias
    the linear layers lack. The first layer runs in float32, because bfloat16 cannot tell
    neighbouring pixels of a 512-pixel row apart.
    """

    def __init__(self, config: TNPConfig) -> None:
        super().__init__()
        d_in = config.d_x + config.d_y + 1
        self.d_y = config.d_y
        self.input = _parameter(config.d_model, d_in, fan_in=d_in)
        self.output = _parameter(config.d_model, config.d_model, fan_in=config.d_model)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """x [B, L, d_x], y [B, L, d_y] or None for targets → [B, L, d_model] in `dtype`."""
        flag = x.new_full((*x.shape[:-1], 1), -1.0 if y is not None else 1.0)
        if y is None:
            y = x.new_zeros(*x.shape[:-1], self.d_y)
        tokens = torch.cat([x, y, flag], dim=-1).to(self.input.dtype)
        return _linear(F.silu(F.linear(tokens, self.input)).to(dtype), self.output)


class Attention(nn.Module):
    """Pre-norm attention with its residual."""

    def __init__(self, config: TNPConfig, implementation: str) -> None:
        super().__init__()
        d_model = config.d_model
        self.n_heads = config.n_heads
        self.implementation = implementation
        self.norm = RMSNorm(d_model)
        self.qkv = _parameter(3 * d_model, d_model, fan_in=d_model)
        self.output = _parameter(
            d_model, d_model, fan_in=d_model, gain=(2 * config.n_layers) ** -0.5
        )

    def project(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """h [B, L, d_model] → q, k, v, each [B, n_heads, L, head_dim], views of one projection."""
        qkv = _linear(self.norm(h), self.qkv).unflatten(-1, (3, self.n_heads, -1))
        q, k, v = qkv.unbind(2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def attend(
        self, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        o = attention(q, k, v, implementation=self.implementation)
        return h + _linear(o.transpose(1, 2).flatten(-2), self.output)

    def forward(self, h: torch.Tensor, n_context: int) -> torch.Tensor:
        q, k, v = self.project(h)
        return self.attend(h, q, k[:, :, :n_context], v[:, :, :n_context])


class MLP(nn.Module):
    """Pre-norm GEMM, SiLU, GEMM with the residual."""

    def __init__(self, config: TNPConfig, d_ff_storage: int) -> None:
        super().__init__()
        d_model, d_ff = config.d_model, config.d_ff
        self.norm = RMSNorm(d_model)
        up = _parameter(d_ff, d_model, fan_in=d_model)
        down = _parameter(d_model, d_ff, fan_in=d_ff, gain=(2 * config.n_layers) ** -0.5)
        self.up = _pad(up, 0, d_ff_storage)
        self.down = _pad(down, 1, d_ff_storage)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + _linear(F.silu(_linear(self.norm(h), self.up)), self.down)


class MixtureHeads(nn.Module):
    """One MLP d_model → d_ff → 1 + 2·d_y for every mixture component."""

    def __init__(self, config: TNPConfig, d_ff_storage: int) -> None:
        super().__init__()
        n, d_model, d_ff = config.n_components, config.d_model, config.d_ff
        self.norm = RMSNorm(d_model)
        up = _parameter(n, d_ff, d_model, fan_in=d_model)
        down = _parameter(n, 1 + 2 * config.d_y, d_ff, fan_in=d_ff)
        self.up = _pad(up, 1, d_ff_storage)
        self.down = _pad(down, 2, d_ff_storage)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """h [B, N, d_model] → logit_weight, mu, log_sigma [B, N, K, 1 + 2·d_y]."""
        hidden = F.silu(_linear(self.norm(h), self.up.flatten(0, 1)))
        hidden = hidden.unflatten(-1, self.up.shape[:2])
        return torch.einsum("bnkf,kof->bnko", hidden, self.down.to(h.dtype))


class Block(nn.Module):
    def __init__(self, config: TNPConfig, variant: Variant) -> None:
        super().__init__()
        self.attention = Attention(config, variant.attention)
        self.mlp = MLP(config, variant.d_ff_storage or config.d_ff)

    def forward(self, h: torch.Tensor, n_context: int) -> torch.Tensor:
        return self.mlp(self.attention(h, n_context))


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
        d_ff_storage = variant.d_ff_storage or config.d_ff
        if d_ff_storage < config.d_ff:
            raise ValueError(
                f"variant {variant.name!r} stores d_ff_storage {d_ff_storage}: it must be at "
                f"least d_ff {config.d_ff}"
            )
        self.config = config
        self.compute_dtype = compute_dtype
        self.checkpoint = checkpoint
        self.embed = Embedding(config)
        self.blocks = nn.ModuleList(Block(config, variant) for _ in range(config.n_layers))
        self.heads = MixtureHeads(config, d_ff_storage)

    def forward(
        self, x_context: torch.Tensor, y_context: torch.Tensor, x_target: torch.Tensor
    ) -> torch.Tensor:
        """Mixture parameters at every target, [B, N, K, 1 + 2·d_y] in `compute_dtype`.

        Args:
            x_context: [B, M, d_x].
            y_context: [B, M, d_y].
            x_target: [B, N, d_x].
        """
        n_context = x_context.shape[1]
        context = self.embed(x_context, y_context, self.compute_dtype)
        targets = self.embed(x_target, None, self.compute_dtype)
        h = torch.cat([context, targets], dim=1)
        for block in self.blocks:
            if self.checkpoint:
                h = checkpoint(block, h, n_context, use_reentrant=False)
            else:
                h = block(h, n_context)
        return self.heads(h[:, n_context:])

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
        return mixture_nll(parameters, y_target, self.config.sigma_min)

    @torch.no_grad()
    def predict(self, task: Task, max_targets: int = 16_384) -> Prediction:
        """The predictive distribution at the task's targets; its y_target is not read.

        The context runs through the blocks once and its keys and values are kept; targets, which
        never see one another, follow in chunks of at most `max_targets`.
        """
        if max_targets < 1:
            raise ValueError(f"max_targets is {max_targets}: it must be at least 1")
        h = self.embed(task.x_context, task.y_context, self.compute_dtype)
        context = []
        for block in self.blocks:
            q, k, v = block.attention.project(h)
            context.append((k, v))
            h = block.mlp(block.attention.attend(h, q, k, v))
        chunks = []
        for x_target in task.x_target.split(max_targets, dim=1):
            h = self.embed(x_target, None, self.compute_dtype)
            for block, (k, v) in zip(self.blocks, context, strict=True):
                q, _, _ = block.attention.project(h)
                h = block.mlp(block.attention.attend(h, q, k, v))
            chunks.append(self.heads(h))
        return Prediction(torch.cat(chunks, dim=1), self.config.sigma_min)
