"""Computes a Gaussian mixture at every target from context points: the network itself.

Every row of context and targets is a query, but only the context rows are keys and values. So no
mask is built, and targets never see one another. Blocks are pre-norm with RMSNorm, SiLU, no bias,
no dropout, no positional encoding (Nguyen and Grover, Transformer Neural Processes, arXiv
2207.04179; the mixture head replaces its single Gaussian).

Parameters are float32 in every variant, and are cast to `compute_dtype` for every step. bfloat16
resolves 4e-3 of a weight. It would lose most of AdamW's updates, which are about 1e-4 of it.
"""

from dataclasses import asdict

import torch
from torch import nn

from tnp.dispatch import devices
from tnp.dispatch.autocast import without_autocast
from tnp.model.buffer_rows import BufferedRows
from tnp.model.config import TNPConfig
from tnp.model.layers import Block, Embedding, MixtureHeads
from tnp.model.packing import Packing
from tnp.model.recomputing import recomputing
from tnp.model.variants import Variant
from tnp.tasks.normalization import Normalization
from tnp.tasks.task import Context, Task, require_points, without_padding
from tnp.tasks.units import Units, in_units

NEWEST = 90  # the compute capability that kernels are tuned for


class Network(nn.Module):
    """Applies the layers of the model, from points to mixture parameters.

    Args:
        config: sizes.
        variant: a `Variant` or its name. It chooses the implementation of each operator. Weights
            and results do not depend on it.
        compute_dtype: dtype of activations and matmuls, also under `torch.autocast`. Parameters are
            float32. None: bfloat16 if the parameters are on a GPU, else float32.
        checkpoint: whether to recompute each block in the backward pass to save memory.
        normalization: the user's units. Tasks and predictions are then in these units.
    """

    def __init__(
        self,
        config: TNPConfig,
        variant: Variant | str = "auto",
        compute_dtype: torch.dtype | None = None,
        checkpoint: bool = False,
        normalization: Normalization | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, TNPConfig):
            raise TypeError(f"config is a {type(config).__name__}: it must be a TNPConfig")
        if isinstance(variant, str):
            variant = Variant.named(variant)
        if not isinstance(variant, Variant):
            raise TypeError(
                f"variant is a {type(variant).__name__}: it must be a Variant or the name of one"
            )
        is_float = isinstance(compute_dtype, torch.dtype) and compute_dtype.is_floating_point
        if compute_dtype is not None and not is_float:
            raise ValueError(
                f"compute_dtype is {compute_dtype!r}: it must be a float dtype, such as "
                "torch.bfloat16"
            )
        if config.buffer is not None and variant.refuses_buffer:
            raise ValueError(f"variant {variant.name!r} {variant.refuses_buffer}")
        # The model may still be moved to a GPU, so this asks for one that all kernels are made for.
        newest = devices.of_capability(NEWEST)
        refused = _refusal(variant, config, compute_dtype or torch.bfloat16, newest)
        if refused is not None:
            raise ValueError(refused)
        self.config = config
        self.variant = variant
        self._in_8_bits = bool(variant.in_8_bits)
        self.asked_dtype = compute_dtype
        self.checkpoint = checkpoint
        self.normalization = normalization
        if normalization is not None:
            if not isinstance(normalization, Normalization):
                kind = type(normalization).__name__
                raise TypeError(f"normalization is a {kind}: it must be a Normalization")
            found = len(normalization.x_mean), len(normalization.y_mean)
            if found != (config.d_x, config.d_y):
                raise ValueError(
                    f"normalization is of d_x {found[0]} and d_y {found[1]}: TNPConfig says "
                    f"{config.d_x} and {config.d_y}"
                )
        self.embed = Embedding(config, variant)
        self.blocks = nn.ModuleList(Block(config, variant) for _ in range(config.n_layers))
        self.heads = MixtureHeads(config, variant)
        self.register_load_state_dict_post_hook(_move_units)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Returns the dtype of activations and matmuls, on the device of the parameters."""
        if self.asked_dtype is not None:
            return self.asked_dtype
        return torch.bfloat16 if self.embed.input.is_cuda else torch.float32

    @without_autocast
    def forward(
        self,
        x_context: torch.Tensor,
        y_context: torch.Tensor | None = None,
        x_target: torch.Tensor | None = None,
        context_lengths: torch.Tensor | None = None,
        target_lengths: torch.Tensor | None = None,
        packing: Packing | None = None,
    ) -> torch.Tensor:
        """Returns mixture parameters at every target, [B, N, K, 1 + 2·d_y].

        They are in `compute_dtype` from PyTorch's heads, and in float32 from ours.

        Args:
            x_context: [B, M, d_x].
            y_context: [B, M, d_y].
            x_target: [B, N, d_x].
            context_lengths, target_lengths: int32 [B], the points of each sample. Later points are
                padding, and so are their predictions. None: all points.
            packing: packs rows, so that only attention computes padding. Results are then packed
                too, [1, targets, K, 1 + 2·d_y].
        """
        if isinstance(x_context, Context | Task):
            raise TypeError(
                f"x_context is a {type(x_context).__name__}: a model is called with tensors "
                "(x_context, y_context, x_target); use predict(context, x_target) or loss(task)"
            )
        x_context, y_context = self.prepared_context(x_context, y_context, context_lengths)
        x_target = self.prepared_x(x_target, target_lengths)
        if packing is not None:
            x_context, y_context = (packing.pack(x, "context") for x in (x_context, y_context))
            x_target = packing.pack(x_target, "target")
        h = self.embed(x_context, y_context, x_target, self.compute_dtype)
        return self.of_targets(h, x_context.shape[1], context_lengths, packing)

    def of_targets(
        self,
        h: torch.Tensor,
        n_known: int,
        context_lengths: torch.Tensor | None,
        layout: Packing | BufferedRows | None,
    ) -> torch.Tensor:
        """Returns mixture parameters of the rows of h after the first `n_known`, which are keys.

        Args:
            h: embedded rows.
            n_known: how many of the first rows are points with known y.
            context_lengths: int32 [B], the keys of each sample, or None.
            layout: how rows are arranged if samples differ in size.
        """
        update, run = None, recomputing(self.checkpoint, self.variant, h.shape[0] * h.shape[1])
        for index, block in enumerate(self.blocks):
            # Only the targets of the last block reach the loss.
            last = index == len(self.blocks) - 1
            first = n_known if last and self.variant.skip_unread else 0
            if run is None:
                h, update = block(h, update, n_known, context_lengths, first, layout)
            else:  # a block keeps its input for the backward pass: one tensor, not two
                h, update = run(block, h, update, n_known, context_lengths, first, layout)
                h, update = h + update, None
        if not self.variant.skip_unread:
            h = h[:, n_known:]
            update = None if update is None else update[:, n_known:]
        return self.heads(h, update)

    def prepared_context(
        self, x: torch.Tensor, y: torch.Tensor, lengths: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns x and y of a context in the model's units, with zeros in place of padding.

        Raises ValueError if they are no context for this model's d_x and d_y.
        """
        if self._in_8_bits and not torch.compiler.is_compiling():
            self.require_device()
        self.check_context(x, y, lengths)
        return (
            without_padding(self.in_units("x", x), lengths),
            without_padding(self.in_units("y", y), lengths),
        )

    def require_device(self, trains: bool = False) -> None:
        """Raises RuntimeError if an operator in 8 bits cannot run on the device of the parameters.

        Args:
            trains: whether gradients are requested.
        """
        target = devices.of_device(self.embed.input.device)
        refused = _refusal(self.variant, self.config, self.compute_dtype, target, trains)
        if refused is not None:
            raise RuntimeError(refused)

    def check_context(self, x: torch.Tensor, y: torch.Tensor, lengths: torch.Tensor | None) -> None:
        """Raises ValueError if they are no context for this model's d_x and d_y."""
        require_points("x_context", x, self.config.d_x, lengths)
        require_points("y_context", y, self.config.d_y, lengths)

    def prepared_x(self, x: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        """Returns x of targets in the model's units. There must be at least one target."""
        require_points("x_target", x, self.config.d_x, lengths)
        return without_padding(self.in_units("x", x), lengths)

    def in_units(self, of: str, values: torch.Tensor) -> torch.Tensor:
        """Returns x or y in the model's units, in float64 for a float64 model, else in float32."""
        return in_units(self.normalization, self.compute_dtype, of, values)

    @property
    def units(self) -> Units:
        """Converts values from the user's units to the model's."""
        return Units(self.normalization, self.compute_dtype)


def _refusal(
    variant: Variant,
    config: TNPConfig,
    dtype: torch.dtype,
    target: devices.Target,
    trains: bool = False,
) -> str | None:
    return variant.refuses(asdict(config), str(dtype).removeprefix("torch."), target, trains)


def _move_units(model: Network, _keys: object) -> None:
    """Moves the units to the weights, which `load_state_dict(…, assign=True)` may have moved."""
    units, device = model.normalization, model.embed.input.device
    if units is not None and units.x_mean.device != device:
        units.to_empty(device=device)
