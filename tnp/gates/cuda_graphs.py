"""Phase 10: a captured training step gives the losses and weights of the eager one."""

from collections.abc import Iterator

import torch

from tnp.gates import models
from tnp.gates.checks import Check, Unsupported, max_abs_error, relative_error
from tnp.step import N_EAGER_BEFORE_CAPTURE, TrainingStep
from tnp.variants import Variant

N_STEPS = N_EAGER_BEFORE_CAPTURE + 5


def checks(device: torch.device) -> Iterator[Check]:
    if device.type != "cuda":
        raise Unsupported("CUDA graphs need a CUDA device")
    for name in models.implementations(device):
        variant = Variant(name, attention=name)

        def run(cuda_graph: bool, variant: Variant = variant):
            model = models.build_model(device, variant)
            step = TrainingStep(model, learning_rate=models.LEARNING_RATE, cuda_graph=cuda_graph)
            return models.train(step, device, N_STEPS), models.weights(model)

        losses, weights = run(cuda_graph=False)
        null_losses, null_weights = run(cuda_graph=False)
        graph_losses, graph_weights = run(cuda_graph=True)
        # The spread of two eager runs: zero for deterministic kernels.
        yield Check(f"losses of {N_STEPS} steps, captured against eager", "max_abs_error",
                    max_abs_error(graph_losses, losses),
                    4 * max_abs_error(null_losses, losses), name)  # fmt: skip
        yield Check(f"weights after {N_STEPS} steps, captured against eager", "relative_error",
                    relative_error(graph_weights, weights),
                    4 * relative_error(null_weights, weights), name)  # fmt: skip
