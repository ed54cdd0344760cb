"""Gives users the Transformer Neural Process: losses, predictions, samples, files."""

from pathlib import Path
from typing import Self

import torch

from tnp.dispatch.autocast import without_autocast
from tnp.model import causal_buffer, checkpoint, prediction, sampling
from tnp.model.network import Network
from tnp.model.packing import Packing
from tnp.model.prediction import Encoding, Prediction
from tnp.model.variants import Variant
from tnp.ops.mixture_nll import mixture_nll
from tnp.tasks.task import Context, Task, without_padding


class TransformerNP(Network):
    """Implements the model of the specification, run as `variant` says.

    `Network` lists the arguments.
    """

    def loss(self, task: Task) -> torch.Tensor:
        """Returns the mean negative log-likelihood per target in nats, a float32 scalar.

        The mean is over all targets of the batch that are no padding. If the model has a buffer,
        half of the targets see points in it (`tnp.model.causal_buffer`).
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
        """Returns the loss of the tensors of a task. `torch.compile` compiles this method.

        With a `capacity`, samples are packed into that many context and target rows
        (`tnp.model.packing`). Each must be larger than the number of points. Both lengths must be
        given then.
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
            parameters = causal_buffer.training_parameters(
                self, context, x_target, y_target, target_lengths
            )
        y_target = self.in_units("y", y_target)
        if packing is not None:
            y_target = packing.pack(without_padding(y_target, target_lengths), "target")
        loss = mixture_nll(
            parameters,
            y_target,
            sigma_min=self.config.sigma_min,
            n_targets=n_targets,
            implementation=self.variant.mixture_nll,
        )
        # The density is per unit of y in the user's units.
        return loss if self.normalization is None else loss + self.normalization.log_volume

    def save(self, folder: Path | str) -> None:
        """Writes the model to `folder`: its sizes, its units, and its weights without padding.

        It writes one file, `model.pt`, with a checksum. An earlier file is replaced whole or not at
        all.

        Raises:
            StoreError: the folder is not writable or the disk is full. An earlier file stays
                unchanged.
        """
        checkpoint.save(self, folder)

    @classmethod
    def load(
        cls,
        folder: Path | str,
        variant: Variant | str = "auto",
        device: torch.device | str = "cpu",
        compute_dtype: torch.dtype | None = None,
    ) -> Self:
        """Returns the model that `save` has written to `folder`, run as `variant`.

        Args:
            folder: the folder that `save` has written.
            variant: a name of `tnp/model/variants.toml`, or a `Variant`.
            device: where to run it.
            compute_dtype: dtype of activations and matmuls; None: the saved model's.

        Raises:
            ValueError: no model is there, or it is damaged.
        """
        return checkpoint.load(cls, folder, variant, device, compute_dtype)

    @torch.no_grad()
    @without_autocast
    def encode(self, context: Context, cuda_graph: bool = False) -> Encoding:
        """Returns keys and values of every block. `predict` takes them in place of the context.

        Predictions from it equal predictions from the context, to the last bit. It belongs to the
        current weights: encode again after they change.

        Args:
            context: points to predict from, as in `task.context`.
            cuda_graph: whether to capture CUDA graphs, for many predictions on a GPU. The second
                prediction at a number of targets is captured, and later ones replay it. This keeps
                a copy of the weights in `compute_dtype`.

        Raises:
            RuntimeError: `cuda_graph` is True, and the context is not on a CUDA device.
        """
        return prediction.encode(self, context, cuda_graph)

    @torch.no_grad()
    @without_autocast
    def predict(
        self, context: Context | Encoding, x_target: torch.Tensor, max_bytes: int = 1 << 30
    ) -> Prediction:
        """Returns the predictive distribution at targets x_target [B, N, d_x].

        Args:
            context: points to predict from, as in `task.context`, or the result of `encode`. Points
                on the CPU must be finite and within the range of the model's dtype.
            x_target: where to predict, a tensor or an array. An array is moved to the model's
                device. Targets never see one another. At a NaN, such as padding, the prediction is
                NaN.
            max_bytes: the most memory for a chunk of targets, in bytes. Keys and values of the
                context, and the results, are not counted.
        """
        return prediction.predict(self, context, x_target, max_bytes)

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
        """Returns samples of coherent functions, [n_samples, B, N, d_y].

        Targets are drawn in the order of x_target [B, N, d_x], each given the earlier ones. With a
        buffer, the context is encoded once, and a drawn point adds one key and value to each block.
        When the buffer is full, its points join the context, which is encoded again. Without a
        buffer the context is encoded again for every point: N times the work of a prediction
        (Bruinsma and others, Autoregressive Conditional Neural Processes, arXiv 2303.14468).

        Args:
            context: points to predict from, as in `task.context`.
            x_target: where to draw. Targets on the CPU must be finite. After a NaN on a GPU all
                later draws are NaN.
            n_samples: how many functions to draw.
            buffer: whether to use the buffer; None: if the model has one.
            cuda_graph: whether to capture CUDA graphs, for many targets on a GPU. The second point
                of a buffer is captured, and later ones replay it.

        Raises:
            ValueError: `buffer` is True, and the model has no buffer.
        """
        return sampling.sample(self, context, x_target, n_samples, buffer, cuda_graph)

    @without_autocast
    def joint_log_density(self, task: Task, buffer: bool | None = None) -> torch.Tensor:
        """Returns log p of all targets of each sample together, given its context: [B] in nats.

        It is Σ log p(y_i | x_i, context, targets before i), which depends on the order of targets.
        With a buffer it takes one pass for each `TNPConfig.buffer` + 1 targets, without one a pass
        for each target. Gradients pass through it.

        Args:
            task: context and targets. Padding does not count.
            buffer: as for `sample_jointly`.
        """
        return sampling.log_density(self, task, buffer)
