"""Phase 9: recomputing blocks in the backward pass changes neither loss nor gradients."""

from collections.abc import Iterator

import torch

from tnp.gates import models
from tnp.gates.checks import Check, max_abs_error, relative_error
from tnp.variants import Variant


def checks(device: torch.device) -> Iterator[Check]:
    batch = models.task(device, 0)
    for name in models.implementations(device):
        variant = Variant(name, attention=name)
        plain = models.build_model(device, variant)
        loss, gradient = models.gradients(plain, batch)
        # SDPA's flash backward adds dQ up in no fixed order: its own two runs differ, and that
        # spread is all the recomputed run may differ by. A deterministic backward has no spread.
        spread = relative_error(models.gradients(plain, batch)[1], gradient)
        again_loss, again = models.gradients(
            models.build_model(device, variant, checkpoint=True), batch
        )
        yield Check("loss with checkpointing against without", "max_abs_error",
                    max_abs_error(again_loss, loss), 0.0, name)  # fmt: skip
        yield Check("gradients with checkpointing against without", "relative_error",
                    relative_error(again, gradient), 4 * spread, name)  # fmt: skip
