"""Phase 6: leaving out what reaches no result, and all operators of ours at once, change no result.

In float64 the model that skips gives the loss and gradients of the one that does not, to the
rounding of sums in another order. In the model's dtype, with every operator of ours, loss and each
gradient are those of float64 as nearly as training needs.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from tnp.gates import models
from tnp.gates.checks import Check, max_abs_error, relative_error, require_ours
from tnp.model import TransformerNP
from tnp.step import TrainingStep
from tnp.tasks import Task
from tnp.variants import OPERATORS, Variant

# Some ten sums of up to a thousand products, each in an order of its own.
FLOAT64_BOUND = 1e-12
LOSS_BOUND = 1e-3  # nats
COSINE_BOUND = 0.999
N_STEPS = 3


def checks(device: torch.device) -> Iterator[Check]:
    require_ours(device)
    chosen, batch = models.scale(device), models.task(device, 0)
    plain = models.build_model(device, Variant("plain", attention="sdpa_flash"))
    exact = models.exact(plain)
    double = Task(*(x.double() for x in batch))
    loss, gradients = models.gradients_by_tensor(exact, double)
    yield from _exactness(exact, double, loss, gradients)
    for attention in ("separate", "fused"):
        operators = dict.fromkeys(OPERATORS, "fused") | {"attention": attention}
        variant = Variant(
            attention, **operators, skip_unread=True, d_ff_storage=chosen.d_ff_storage
        )
        model = models.build_model(device, variant)
        ours, ours_gradients = models.gradients_by_tensor(model, batch)
        yield Check("all operators of ours, loss against float64", "abs_error_nats",
                    max_abs_error(ours, loss), LOSS_BOUND, attention)  # fmt: skip
        for name, reference in gradients.items():
            own = ours_gradients[name][tuple(map(slice, reference.shape))]  # without the padding
            cosine = torch.cosine_similarity(own.double().flatten(), reference.flatten(), dim=0)
            yield Check(f"all operators of ours, gradient of {name} against float64", "cosine",
                        cosine.item(), COSINE_BOUND, attention, True)  # fmt: skip
        models.train(TrainingStep(model, learning_rate=chosen.learning_rate), device, N_STEPS)
        yield Check(f"all operators of ours, padding after {N_STEPS} optimizer steps",
                    "max_abs_value", models.padding(model), 0.0, attention)  # fmt: skip


def _exactness(
    exact: TransformerNP, double: Task, loss: torch.Tensor, gradients: dict[str, torch.Tensor]
) -> Iterator[Check]:
    skipping = models.exact(exact)
    variant = replace(skipping.variant, skip_unread=True)
    skipping.variant = variant
    for block in skipping.blocks:
        block.attention.variant = variant
    skipped, skipped_gradients = models.gradients_by_tensor(skipping, double)
    yield Check("float64 loss, unread rows skipped", "max_abs_error",
                max_abs_error(skipped, loss), FLOAT64_BOUND)  # fmt: skip
    for name, reference in gradients.items():
        yield Check(f"float64 gradient of {name}, unread rows skipped", "relative_error",
                    relative_error(skipped_gradients[name], reference), FLOAT64_BOUND)  # fmt: skip
