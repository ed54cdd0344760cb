"""Phase 9: recomputing blocks in the backward pass changes neither loss nor gradients."""

from collections.abc import Iterator
from dataclasses import replace
from statistics import median

import torch

from tnp.gates import models
from tnp.gates.checks import Check, max_abs_error, relative_error
from tnp.variants import Variant

# Backward passes that add dQ up in no fixed order (SDPA's flash, ours `fused`) differ from run to
# run, mostly by 1e-6 and now and then, where a rounding tips over, by 1e-4. So several runs each:
# the median recomputed one may be MARGIN times as far off as the farthest plain one. Without a
# spread there is no margin.
RUNS = {"cuda": 5, "cpu": 1}
MARGIN = 4


def checks(device: torch.device) -> Iterator[Check]:
    for name, variant in models.variants(device):
        yield from recomputed_checks(device, name, variant)


def recomputed_checks(device: torch.device, name: str, variant: Variant) -> Iterator[Check]:
    """Of one variant; `name` is the implementation of attention."""
    batch = models.task(device, 0)
    runs = range(RUNS[device.type])
    plain = models.build_model(device, variant)
    loss, gradient = models.gradients(plain, batch)
    spread = max(relative_error(models.gradients(plain, batch)[1], gradient) for _ in runs)
    for what, variant_, checkpoint in (
        ("with checkpointing", variant, True),
        ("with all but attention computed again", replace(variant, recompute_above=1), False),
    ):
        recomputing = models.build_model(device, variant_, checkpoint=checkpoint)
        recomputed = [models.gradients(recomputing, batch) for _ in runs]
        losses = max(max_abs_error(other, loss) for other, _ in recomputed)
        yield Check(f"{variant.name}: loss {what} against without", "max_abs_error",
                    losses, 0.0, name)  # fmt: skip
        yield Check(f"{variant.name}: gradients {what} against without", "relative_error",
                    median(relative_error(other, gradient) for _, other in recomputed),
                    MARGIN * spread, name)  # fmt: skip
