"""The Transformer Neural Process as a user holds it: losses, predictions, samples, files."""

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
    """The model of the specification, run as `variant` says. `Network` lists the arguments."""

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
            parameters = causal_buffer.training_parameters(
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
        checkpoint.save(self, folder)

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
        return checkpoint.load(cls, folder, variant, device, compute_dtype)

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
