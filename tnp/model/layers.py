"""Defines the layers of the Transformer Neural Process. A variant chooses their kernels.

Each layer is pre-norm. The norm of the next layer adds its update to the residual stream, which
that norm reads anyway.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from tnp.dispatch.private import has_global_hooks, has_hooks
from tnp.dispatch.registry import is_automatic
from tnp.model.buffer_rows import BufferedRows
from tnp.model.packing import Packing
from tnp.model.variants import Variant
from tnp.ops.attention import attention
from tnp.ops.attention.torch_forms import LN_2
from tnp.ops.decode_attention import decode_attention
from tnp.ops.embedding import embed_rows
from tnp.ops.mixture_heads import mixture_heads
from tnp.ops.mlp import mlp
from tnp.ops.projection import linear, project_qkv
from tnp.ops.projection.qkv import query_factor
from tnp.ops.rms_norm import add_rms_norm, rms_norm
from tnp.ops.rms_norm_linear import rms_norm_linear
from tnp.ops.transformer_block import transformer_block

if TYPE_CHECKING:
    from tnp.model.config import TNPConfig

NORM_EPS = 1e-6
# Up to so many rows, a norm and its product take less time in one launch than in two (H200, d_model
# 512: 4.4 against 5.5 µs for 16 rows, 8.3 against 5.9 for 128).
FEW_ROWS = 16


def _parameter(*shape: int, fan_in: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * (gain / math.sqrt(fan_in)))


def _pad(weight: nn.Parameter, dim: int, width: int) -> nn.Parameter:
    padding = list(weight.shape)
    padding[dim] = width - weight.shape[dim]
    return nn.Parameter(torch.cat([weight.detach(), weight.new_zeros(padding)], dim))


class HiddenLayer(nn.Module):
    """Holds weights up [..., F, D] and down [..., O, F], and a norm before them.

    F is zero-padded from `d_ff` to the width that the variant stores. That is exact: SiLU(0) = 0,
    and zeros stay zero if the optimizer treats each weight by itself.
    """

    def __init__(
        self, config: TNPConfig, variant: Variant, up: nn.Parameter, down: nn.Parameter
    ) -> None:
        super().__init__()
        self.norm = RMSNorm(config, variant)
        self.d_ff, self.width = config.d_ff, variant.storage(config.d_ff)
        self.up, self.down = _pad(up, -2, self.width), _pad(down, -1, self.width)

    def padding(self) -> dict[str, torch.Tensor]:
        """Returns the parts of `up` and `down` that must be 0, by name, as views."""
        up, down = self.up.detach(), self.down.detach()
        return {"up": up[..., self.d_ff :, :], "down": down[..., self.d_ff :]}

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args) -> None:
        given = state_dict.get(prefix + "up")
        found = getattr(given, "shape", ())[-2:-1]
        if found and found != (self.width,):
            raise ValueError(
                f"{prefix}up is {found[0]} units wide in the state and {self.width} in this model, "
                f"whose d_ff is {self.d_ff}: build the model with the d_ff_storage that the state "
                "has, or use Network.save and load, which take any"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)


class RMSNorm(nn.Module):
    """Normalizes the input of a layer, after adding the update of the layer before it."""

    def __init__(self, config: TNPConfig, variant: Variant) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.d_model))
        self.implementation, self.with_product = variant.rms_norm, variant.rms_norm_linear

    def forward(
        self, h: torch.Tensor, update: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns h + update and its norm, both [B, L, d_model]."""
        options = {"eps": NORM_EPS, "implementation": self.implementation}
        if update is None:
            return h, rms_norm(h, self.weight, **options)
        return add_rms_norm(h, update, self.weight, **options)

    def takes_product(self, h: torch.Tensor) -> bool:
        """Returns whether the norm of these rows and its product are one launch."""
        return self.with_product is not None and h.shape[:-1].numel() <= FEW_ROWS

    def times(
        self, h: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, silu: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns h + update, and the product of its norm with weight [n_out, d_model], or the SiLU
        of that product. There is no gradient.
        """
        return rms_norm_linear(
            h, update, self.weight, weight,
            eps=NORM_EPS, silu=silu, implementation=self.with_product,
        )  # fmt: skip


class Embedding(nn.Module):
    """Embeds (x, y, target flag) in d_model dimensions: linear, SiLU, linear.

    The flag is −1 for context and +1 for targets, whose y is 0. It is never zero, so it also serves
    as the bias that the linear layers lack. The first layer runs in float32, because bfloat16
    cannot distinguish neighbouring pixels of a 512-pixel row.

    A point of the buffer is embedded as a context point, plus `role`. That parameter starts at 0,
    so a model with a buffer starts like a model without one.
    """

    def __init__(self, config: TNPConfig, variant: Variant) -> None:
        super().__init__()
        d_in = config.d_x + config.d_y + 1
        self.input = _parameter(config.d_model, d_in, fan_in=d_in)
        self.output = _parameter(config.d_model, config.d_model, fan_in=config.d_model)
        if config.buffer is not None:
            self.role = nn.Parameter(torch.zeros(config.d_model))
        self.variant = variant

    def forward(
        self,
        x_context: torch.Tensor | None,
        y_context: torch.Tensor | None,
        x_target: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Maps x [B, rows, d_x] and y_context [B, M, d_y] to [B, M + N, d_model] in `dtype`.

        Without context, x_context and y_context are None. Without targets, x_target is None.
        """
        hidden = embed_rows(
            x_context, y_context, x_target, self.input, dtype, implementation=self.variant.embedding
        )
        return linear(hidden, self.output, implementation=self.variant.projection)

    def buffered(
        self,
        x_known: torch.Tensor,
        y_known: torch.Tensor,
        n_buffer: int,
        x_target: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Embeds the same points, of which the last `n_buffer` known ones are in the buffer."""
        h = self(x_known, y_known, x_target, dtype)
        # `h[:, …] += …` would also assign the sum, and so copy the gradient of h twice.
        h.narrow(1, x_known.shape[1] - n_buffer, n_buffer).add_(self.role.to(dtype))
        return h


class Attention(nn.Module):
    """Applies pre-norm attention."""

    def __init__(self, config: TNPConfig, variant: Variant) -> None:
        super().__init__()
        d_model = config.d_model
        self.n_heads = config.n_heads
        self.variant, self.base2 = variant, variant.base2
        self.buffered = variant.buffered_attention  # its implementation, or None
        self.norm = RMSNorm(config, variant)
        self.qkv = _parameter(3 * d_model, d_model, fan_in=d_model)
        self.output = _parameter(
            d_model, d_model, fan_in=d_model, gain=(2 * config.n_layers) ** -0.5
        )

    def project(
        self,
        x: torch.Tensor,
        n_k: int | None = None,
        first: int = 0,
        n_keys: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns q of the rows from `first` on, and k and v of `n_k` rows (None: all rows).

        Each is [B, n_heads, rows, D].

        If the variant centres keys, the mean is over the first n_keys[b] rows of sample b.
        """
        centred = self.variant.centred_keys
        return project_qkv(
            x, self.qkv, self.n_heads, n_k=n_k, first=first, base2=self.base2,
            centred=centred, n_keys=n_keys if centred else None,
            implementation=self.variant.projection,
        )  # fmt: skip

    def projection_weight(self, dtype: torch.dtype, n_parts: int) -> torch.Tensor:
        """Returns the weight for `project_cast`, [n_parts · d_model, d_model] in `dtype`.

        It has the first n_parts of q, k and v. The rows of q include the factor of the scores.
        """
        weight, *others = self.qkv.chunk(3)[:n_parts]
        if self.base2:
            weight = weight * query_factor(len(weight), self.n_heads, self.base2)
        return (torch.cat([weight, *others]) if others else weight).to(dtype)

    def project_cast(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiplies rows by `projection_weight`. Returns [B, n_parts · n_heads, rows, D]."""
        return self._as_heads(linear(x, weight, implementation=self.variant.projection))

    def norm_and_project_cast(
        self, h: torch.Tensor, update: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns h + update, and `project_cast` of its norm. There is no gradient."""
        if self.norm.takes_product(h):
            h, x = self.norm.times(h, update, weight)
            return h, self._as_heads(x)
        h, x = self.norm(h, update)
        return h, self.project_cast(x, weight)

    def _as_heads(self, x: torch.Tensor) -> torch.Tensor:
        head_dim = len(self.output) // self.n_heads
        return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        n_keys: torch.Tensor | None = None,
        layout: Packing | BufferedRows | None = None,
    ) -> torch.Tensor:
        """Returns the update of the rows of q. Sample b has n_keys[b] keys; None means all.

        `layout` says how rows are arranged. The update is arranged in the same way.
        """

        def heads(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            n_keys: torch.Tensor | None = n_keys,
            causal: bool = False,
        ) -> torch.Tensor:
            o = attention(
                q, k, v, base2=self.base2, causal=causal, n_keys=n_keys,
                implementation=self.variant.attention,
            )  # fmt: skip
            return o.transpose(1, 2).flatten(-2)

        if layout is None:
            o = heads(q, k, v)
        elif isinstance(layout, BufferedRows) and layout.refuses(self.buffered, q, k) is None:
            o = layout.at_once(q, k, v, self.base2, self.buffered)
        else:
            o = layout.around(heads, q, k, v)
        return linear(o, self.output, implementation=self.variant.projection)

    def attend_cache(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, n_keys: torch.Tensor
    ) -> torch.Tensor:
        """Returns the update of a few rows that see the first n_keys[b] keys of a cache.

        There is no gradient.
        """
        o = decode_attention(
            q, k, v, n_keys, scale=LN_2 if self.base2 else None, full=True,
            implementation=self.variant.decode_attention,
        )  # fmt: skip
        o = o.transpose(1, 2).flatten(-2)
        return linear(o, self.output, implementation=self.variant.projection)

    def forward(
        self,
        h: torch.Tensor,
        update: torch.Tensor | None,
        n_context: int,
        n_keys: torch.Tensor | None,
        first: int,
        layout: Packing | BufferedRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns h + update of the rows from `first` on, and the update that attention makes."""
        h, x = self.norm(h, update)
        if self.variant.skip_unread:
            q, k, v = self.project(x, n_context, first, n_keys)
        else:
            q, k, v = self.project(x)
            k, v = k[:, :, :n_context], v[:, :, :n_context]
        # The gradient of a slice copies the whole tensor, even if nothing is cut off.
        return h[:, first:] if first else h, self.attend(q, k, v, n_keys, layout)


class MLP(HiddenLayer):
    """Applies the norm, a product, SiLU, and a second product."""

    def __init__(self, config: TNPConfig, variant: Variant) -> None:
        d_model, d_ff = config.d_model, config.d_ff
        up = _parameter(d_ff, d_model, fan_in=d_model)
        down = _parameter(d_model, d_ff, fan_in=d_ff, gain=(2 * config.n_layers) ** -0.5)
        super().__init__(config, variant, up, down)
        self.variant = variant

    def forward(self, h: torch.Tensor, update: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns h + update, and the update that the MLP makes."""
        h, x = self.norm(h, update)
        return h, mlp(x, self.up, self.down, implementation=self.variant.mlp)

    def of_few(self, h: torch.Tensor, update: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs `forward` without a gradient, in two launches for a few rows."""
        if not self.norm.takes_product(h):
            return self(h, update)
        h, hidden = self.norm.times(h, update, self.up, silu=True)
        return h, linear(hidden, self.down, implementation=self.variant.projection)


class MixtureHeads(HiddenLayer):
    """Applies one MLP d_model → d_ff → 1 + 2·d_y for every mixture component."""

    def __init__(self, config: TNPConfig, variant: Variant) -> None:
        n, d_model, d_ff = config.n_components, config.d_model, config.d_ff
        up = _parameter(n, d_ff, d_model, fan_in=d_model)
        down = _parameter(n, 1 + 2 * config.d_y, d_ff, fan_in=d_ff, gain=config.heads_gain)
        super().__init__(config, variant, up, down)
        self.implementation = variant.mixture_heads

    def forward(self, h: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """Maps [B, N, d_model] to logit_weight, mu, log_sigma [B, N, K, 1 + 2·d_y]."""
        _, x = self.norm(h, update)
        y = mixture_heads(x, self.up, self.down, implementation=self.implementation)
        # PyTorch's einsum returns a view. If sizes vary, compiled code assumes the strides of the
        # first size (torch 2.13). Our results are contiguous.
        return y.contiguous()


class Block(nn.Module):
    """Runs attention and an MLP as one operator, `transformer_block`, if all layers are ours.

    It calls the layers one by one if the variant uses PyTorch's, if samples are packed or buffered,
    or if a layer has hooks or was replaced. It also does so for more than `recompute_above` rows,
    and if tables choose a layer that is not ours.
    """

    def __init__(self, config: TNPConfig, variant: Variant) -> None:
        super().__init__()
        self.attention = Attention(config, variant)
        self.mlp = MLP(config, variant)
        self.variant = variant
        self.layers, self.centred = variant.block, variant.centred_keys
        self.automatic = any(is_automatic(name) for _, name in self.layers or ())
        self.recompute_above = variant.recompute_above or math.inf

    def forward(
        self,
        h: torch.Tensor,
        update: torch.Tensor | None,
        n_context: int,
        n_keys: torch.Tensor | None,
        first: int,
        layout: Packing | BufferedRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the residual stream of the rows from `first` on, and an update still to be added.

        Each layer leaves its addition to the next norm, which reads the stream anyway.
        """
        if layout is None and self._can_run_as_one(h):
            attention, mlp = self.attention, self.mlp
            weights = (
                attention.norm.weight, attention.qkv, attention.output,
                mlp.norm.weight, mlp.up, mlp.down,
            )  # fmt: skip
            how = {"n_k": n_context, "first": first, "n_keys": n_keys, "centred": self.centred}
            found = transformer_block(
                h, update, weights, attention.n_heads, **how, eps=NORM_EPS, layers=self.layers,
                implementation="fused", or_none=self.automatic,
            )  # fmt: skip
            if found is not None:
                return found
        return self.mlp(*self.attention(h, update, n_context, n_keys, first, layout))

    def _can_run_as_one(self, h: torch.Tensor) -> bool:
        """Returns whether h is small enough, and no layer has hooks or was replaced."""
        if self.layers is None or h.shape[0] * h.shape[1] > self.recompute_above:
            return False
        attention, mlp = self._modules["attention"], self._modules["mlp"]
        if attention.__class__ is not Attention or mlp.__class__ is not MLP:
            return False
        if attention.variant is not self.variant or mlp.variant is not self.variant:
            return False
        norms = attention._modules["norm"], mlp._modules["norm"]
        for norm in norms:
            replaced = norm.__class__ is not RMSNorm
            if replaced or norm.implementation != self.variant.rms_norm:
                return False
        layers = attention, mlp, *norms
        return not (
            has_global_hooks()
            or any(has_hooks(one) for one in layers)
            # PyTorch 2.11 compiles `in` of a `__dict__`, but not `isdisjoint` with it.
            or any(name in one.__dict__ for one in layers for name in _METHODS)
        )


# A layer that has one of these in its `__dict__` was changed from outside.
_METHODS = sorted(
    {
        name
        for kind in (Attention, HiddenLayer, MLP, RMSNorm)
        for name in vars(kind)
        if not name.startswith("__")
    }
)
