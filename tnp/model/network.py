"""The Transformer Neural Process: from context points to a Gaussian mixture at every target.

Every row, context and target alike, is a query; only the context rows are keys and values
(rectangular attention), so no mask is ever built and targets never see one another. Blocks are
pre-norm with RMSNorm, SiLU, no bias, no dropout, no positional encoding (Nguyen and Grover,
Transformer Neural Processes, arXiv 2207.04179; the mixture head replaces its single Gaussian).

Parameters are float32 in every variant and are cast to `compute_dtype` for every step: bfloat16
resolves 4e-3 of a weight, and would drop most of AdamW's updates, which are some 1e-4 of it.
"""

from pathlib import Path
from typing import Self

import torch
from torch import nn

from tnp.dispatch.autocast import without_autocast
from tnp.model import causal_buffer as buffer
from tnp.model import checkpoint as saved_model
from tnp.model import prediction, sampling
from tnp.model.config import TNPConfig
from tnp.model.layers import Block, Embedding, MixtureHeads
from tnp.model.packing import Packing
from tnp.model.prediction import Encoding, Prediction
from tnp.model.recomputing import recomputing
from tnp.model.variants import Variant
from tnp.ops.mixture_nll import mixture_nll
from tnp.tasks import Context, Task
from tnp.tasks.normalization import Normalization
from tnp.tasks.task import without_padding
from tnp.tasks.units import Units, in_units, require_points
from tnp.util.checks import require_count


class TransformerNP(nn.Module):
    """The model of the specification, run as `variant` says.

    Args:
        config: sizes.
        variant: implementation of each operator, a `Variant` or the name of one; weights and
            results do not depend on it.
        compute_dtype: dtype of activations and matmuls, also under `torch.autocast`; parameters
            are float32. None: bfloat16 where the parameters lie on a GPU, else float32.
        checkpoint: recompute each block in the backward pass instead of keeping its activations.
        normalization: of the user's units; tasks and predictions are then in them.
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
        self.config = config
        self.variant = variant
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
        """The dtype of activations and matmuls, on the device where the parameters are now."""
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
        """Mixture parameters at every target, [B, N, K, 1 + 2·d_y], as the heads give them.

        In `compute_dtype` from PyTorch's heads, in float32 from ours.

        Args:
            x_context: [B, M, d_x].
            y_context: [B, M, d_y].
            x_target: [B, N, d_x].
            context_lengths, target_lengths: int32 [B], the points that each sample has; what stands
                past them is padding, and so is what is predicted there. None: all.
            packing: computes padding nowhere but in attention; results are then packed too,
                [1, targets, K, 1 + 2·d_y].
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
        layout: Packing | buffer.BufferedRows | None,
    ) -> torch.Tensor:
        """Mixture parameters of the rows of h behind `n_known` others, which are keys and values.

        Args:
            h: what `embed` gives.
            n_known: its first rows: points whose y is known.
            context_lengths: int32 [B], keys that each sample has, or None.
            layout: how rows stand, where they are not all samples of one size.
        """
        update, run = None, recomputing(self.checkpoint, self.variant, h.shape[0] * h.shape[1])
        for index, block in enumerate(self.blocks):
            # Of the last block only the targets reach the loss.
            last = index == len(self.blocks) - 1
            first = n_known if last and self.variant.skip_unread else 0
            if run is None:
                h, update = block(h, update, n_known, context_lengths, first, layout)
            else:  # what a block is given is kept: one tensor, not two
                h, update = run(block, h, update, n_known, context_lengths, first, layout)
                h, update = h + update, None
        if not self.variant.skip_unread:
            h = h[:, n_known:]
            update = None if update is None else update[:, n_known:]
        return self.heads(h, update)

    def prepared_context(
        self, x: torch.Tensor, y: torch.Tensor, lengths: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x and y of a context in the model's units, zeros in place of padding.

        Raises ValueError where they are no context of this model's dimensions.
        """
        self.check_context(x, y, lengths)
        return (
            without_padding(self.in_units("x", x), lengths),
            without_padding(self.in_units("y", y), lengths),
        )

    def check_context(self, x: torch.Tensor, y: torch.Tensor, lengths: torch.Tensor | None) -> None:
        """Raises ValueError where they are no context of this model's dimensions."""
        require_points("x_context", x, self.config.d_x, lengths)
        require_points("y_context", y, self.config.d_y, lengths)

    def prepared_x(self, x: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        """The same of targets, of which there must be one at least."""
        require_points("x_target", x, self.config.d_x, lengths)
        return without_padding(self.in_units("x", x), lengths)

    def in_units(self, of: str, values: torch.Tensor) -> torch.Tensor:
        """x or y in the model's units and in float32, in float64 where the model computes in it."""
        return in_units(self.normalization, self.compute_dtype, of, values)

    @property
    def units(self) -> Units:
        """Takes values from the user's units to the model's."""
        return Units(self.normalization, self.compute_dtype)

    def loss(self, task: Task) -> torch.Tensor:
        """Mean negative log-likelihood per target in nats, a float32 scalar.

        The mean is over all targets of the batch that are no padding. Where the model has a buffer,
        half of them see what is in it (`tnp.model.causal_buffer`).
        """
        return self.nll(*task)

    @without_autocast
    def nll(
        self,
        x_context: torch.Tensor,
        y_context: torch.Tensor,
        x_target: torch.Tensor,
        y_target: torch.Tensor,
        context_lengths: torch.Tensor | None = None,
        target_lengths: torch.Tensor | None = None,
        capacity: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """The loss of the tensors of a task: what `torch.compile` is given.

        With a `capacity` samples of sizes of their own are packed into so many context and target
        rows, each more than there are points (`tnp.model.packing`). Both lengths must be given
        then.
        """
        packing, n_targets = None, target_lengths
        if capacity is not None:
            if context_lengths is None or target_lengths is None:
                raise ValueError(
                    "a capacity is given and no lengths: packing needs context_lengths and "
                    "target_lengths, which task.padded(…) makes"
                )
            if self.config.buffer is not None:
                raise ValueError("a capacity is given: a model with a buffer packs no rows")
            padded = x_context.shape[1], x_target.shape[1]
            packing = Packing(context_lengths, target_lengths, padded, capacity)
            n_targets = packing.n_targets
        if self.config.buffer is None:
            given = x_context, y_context, x_target, context_lengths, target_lengths, packing
            parameters = self(*given)
        else:
            context = Context(x_context, y_context, context_lengths)
            parameters = buffer.training_parameters(
                self, context, x_target, y_target, target_lengths
            )
        y_target = self.in_units("y", y_target)
        if packing is not None:
            y_target = packing.pack(without_padding(y_target, target_lengths), "target")
        loss = mixture_nll(
            parameters,
            y_target,
            self.config.sigma_min,
            n_targets=n_targets,
            implementation=self.variant.mixture_nll,
        )
        # A density per unit of the user's.
        return loss if self.normalization is None else loss + self.normalization.log_volume

    def save(self, folder: Path | str) -> None:
        """Write the model to `folder`: its sizes, its units, and its weights without padding.

        One file, `model.pt`, replaced whole or not at all, with a checksum.

        Raises:
            StoreError: the folder is not writable or full; what was there before stays.
        """
        saved_model.save(self, folder)

    @classmethod
    def load(
        cls,
        folder: Path | str,
        variant: Variant | str = "auto",
        device: torch.device | str = "cpu",
        compute_dtype: torch.dtype | None = None,
    ) -> Self:
        """The model that `save` has written to `folder`, run as another variant if one likes.

        Args:
            folder: where it is.
            variant: a name of `tnp/model/variants.toml`, or a variant of one's own.
            device: where it is to run.
            compute_dtype: of activations and matmuls; None: that of the model that was saved.

        Raises:
            ValueError: no model is there, or it is damaged.
        """
        return saved_model.load(cls, folder, variant, device, compute_dtype)

    @torch.no_grad()
    @without_autocast
    def encode(self, context: Context, cuda_graph: bool = False) -> Encoding:
        """Keys and values of every block, which `predict` takes in the context's place.

        Predictions from it are those from the context, to the last bit. It is of the weights as
        they are now: encode anew where they have changed.

        Args:
            context: points to predict from, as in `task.context`.
            cuda_graph: for many predictions on a GPU, which launched one by one wait for the host.
                The second prediction of a number of targets records their way through the model,
                and those behind it replay it. Keeps a copy of the weights in `compute_dtype`.

        Raises:
            RuntimeError: a CUDA graph is asked for where there is no CUDA device.
        """
        return prediction.encode(self, context, cuda_graph)

    @torch.no_grad()
    @without_autocast
    def predict(
        self, context: Context | Encoding, x_target: torch.Tensor, max_bytes: int = 1 << 30
    ) -> Prediction:
        """The predictive distribution at targets x_target [B, N, d_x].

        Args:
            context: points to predict from, as in `task.context`, or what `encode` made of them.
                Points on the CPU must be finite, and not past what the model's dtype holds.
            x_target: where to predict, a tensor or an array, which goes to the model's device.
                Targets never see one another: at one that is NaN, such as the padding of a batch,
                the prediction is NaN.
            max_bytes: of memory for the targets, which follow one another in as many chunks as that
                takes. Keys and values of the context, and the results, are not counted.
        """
        max_bytes = require_count("max_bytes", max_bytes, at_least=1)
        encoding = context if isinstance(context, Encoding) else self.encode(context)
        x_target = self.prepared_x(prediction.on_device(self, "x_target", x_target))
        if x_target.shape[0] != encoding.batch:
            raise ValueError(
                f"x_target has {x_target.shape[0]} samples and the context {encoding.batch}: they "
                "must have as many"
            )
        chunk = max_bytes // (encoding.batch * prediction.bytes_per_target(self))
        parts = [encoding.decode(self, x) for x in x_target.split(max(1, chunk), dim=1)]
        parameters = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return Prediction(parameters, self.config.sigma_min, self.normalization)

    @torch.no_grad()
    @without_autocast
    def sample_jointly(
        self,
        context: Context,
        x_target: torch.Tensor,
        n_samples: int = 1,
        buffer: bool | None = None,
        cuda_graph: bool = False,
    ) -> torch.Tensor:
        """Functions that hang together, [n_samples, B, N, d_y].

        Targets are drawn in the order of x_target [B, N, d_x], each knowing those before it.
        Through the buffer the context is encoded once, and a drawn point is one more key and value
        of each block; where the buffer is full its points join the context, which is encoded anew.
        Without a buffer that is done for every point: N times the work of a prediction (Bruinsma
        and others, Autoregressive Conditional Neural Processes, arXiv 2303.14468).

        Args:
            context: points to predict from, as in `task.context`.
            x_target: where to draw. Targets on the CPU must be finite; behind one that is NaN on a
                GPU all that follow it are.
            n_samples: draws of each function.
            buffer: whether to go through the buffer; None: where the model has one.
            cuda_graph: for many targets on a GPU: the second point of a buffer records its way
                through the model, and those behind it replay it.

        Raises:
            ValueError: the model has no buffer, and one is asked for.
        """
        return sampling.sample(self, context, x_target, n_samples, buffer, cuda_graph)

    @without_autocast
    def joint_log_density(self, task: Task, buffer: bool | None = None) -> torch.Tensor:
        """log p of all targets of each sample together, [B] in nats, given its context.

        Σ log p(y_i | x_i, context, targets before i), which depends on their order. Through the
        buffer it takes one pass for each `TNPConfig.buffer` + 1 targets, without a buffer one for
        each target. Gradients go through it.

        Args:
            task: whose targets; padding has no part.
            buffer: as for `sample_jointly`.
        """
        return sampling.log_density(self, task, buffer)


def _move_units(model: TransformerNP, _keys: object) -> None:
    """Moves the units to the weights, which `load_state_dict(…, assign=True)` may put elsewhere."""
    units, device = model.normalization, model.embed.input.device
    if units is not None and units.x_mean.device != device:
        units.to_empty(device=device)
