"""Checks phase 9: recomputing blocks in the backward pass changes neither loss nor gradients."""

from collections.abc import Iterator
from statistics import median

import torch

from tnp.gates import models
from tnp.gates.checks import Check, max_abs_error, relative_error

# Backward passes that add up dQ in no fixed order (SDPA's flash, our `fused`) differ from run to
# run, mostly by 1e-6, and rarely by 1e-4, when a rounding tips over. So there are several runs: the
# median recomputed run may differ MARGIN times as much as the farthest plain run. Without a spread
# there is no margin.
RUNS = {"cuda": 5, "cpu": 1}
MARGIN = 4


def checks(device: torch.device) -> Iterator[Check]:
    batch = models.task(device, 0)
    runs = range(RUNS[device.type])
    for name, variant in models.variants(device):
        plain = models.build_model(device, variant)
        loss, gradient = models.gradients(plain, batch)
        spread = max(relative_error(models.gradients(plain, batch)[1], gradient) for _ in runs)
        for what, recomputing in models.recomputing(device, variant):
            recomputed = [models.gradients(recomputing, batch) for _ in runs]
            losses = max(max_abs_error(other, loss) for other, _ in recomputed)
            yield Check(f"{variant.name}: loss {what} against not", "max_abs_error",
                        losses, 0.0, name)  # fmt: skip
            yield Check(f"{variant.name}: gradients {what} against not", "relative_error",
                        median(relative_error(other, gradient) for _, other in recomputed),
                        MARGIN * spread, name)  # fmt: skip
