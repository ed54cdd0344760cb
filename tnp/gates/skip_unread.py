"""Checks phase 6: skipping rows that no result needs changes no result, with all our operators.

In float64, the model that skips gives the loss and gradients of the other, except for the rounding
of sums in another order. In the model's dtype, with all our operators, loss and gradients are as
near to float64 as training needs, and as PyTorch's own. Compiled and recomputed steps are as near
as eager ones. Captured steps equal the eager ones.
"""

from collections.abc import Callable, Iterator

import torch

from tnp.dispatch.spec import Budget
from tnp.gates import models
from tnp.gates.checks import Check, Unsupported, error_ratio, max_abs_error
from tnp.gates.cuda_graphs import captured_checks
from tnp.gates.models import LOSS_BOUND
from tnp.model.transformer_np import TransformerNP
from tnp.model.variants import Variant
from tnp.tasks.task import Task
from tnp.train.step import TrainingStep

COSINE_BOUND = 0.999
# Bound of an error over the eager gradient's error. Our kernels are the same, but other operations
# round in other places. A recomputed block adds its update to the stream at its end, so that the
# gradient of the sum is rounded once more.
EAGER_BUDGET = 2.0
N_STEPS = 3


def checks(device: torch.device) -> Iterator[Check]:
    if "fused" not in models.implementations(device):
        raise Unsupported(f"our attention does not run on {device}")
    chosen, batch = models.scale(device), models.task(device, 0)
    plain = models.build_model(device, Variant("plain", attention="sdpa_flash"))
    exact = models.exact(plain)
    double = batch.to(dtype=torch.float64)
    loss, gradients = models.gradients_by_tensor(exact, double)
    _, own = models.gradients_by_tensor(plain, batch)
    skipping = models.gradients_by_tensor(models.exact(plain, skip_unread=True), double)
    yield from models.float64_checks(", unread rows skipped", skipping, (loss, gradients))
    for attention in ("separate", "fused"):
        model = models.build_model(device, models.ours(device, attention))
        ours, padded = models.gradients_by_tensor(model, batch)
        ours_gradients = models.without_padding(padded, gradients)
        yield Check("all operators of ours, loss against float64", "abs_error_nats",
                    max_abs_error(ours, loss), LOSS_BOUND, attention)  # fmt: skip
        for name, reference in gradients.items():
            what, gradient = f"gradient of {name} against float64", ours_gradients[name]
            cosine = torch.cosine_similarity(
                gradient.double().flatten(), reference.flatten(), dim=0
            )
            yield Check(f"all operators of ours, {what}", "cosine",
                        cosine.item(), COSINE_BOUND, attention, True)  # fmt: skip
            # A cosine does not see the scale.
            yield Check(f"all operators of ours, {what}", "error_ratio",
                        error_ratio(gradient, own[name], reference), Budget.gradients,
                        attention)  # fmt: skip
        eager = (ours, ours_gradients, gradients)
        for what, switched in models.recomputing(device, model.variant):
            yield from _as_near(what, switched, None, batch, *eager)
        if attention == "fused":  # `separate` would take Inductor as long again
            yield from _as_near("compiled", model, _compiled(model, device), batch, *eager)
        models.train(TrainingStep(model, learning_rate=chosen.learning_rate), device, N_STEPS)
        yield Check(f"all operators of ours, padding after {N_STEPS} optimizer steps",
                    "max_abs_value", models.padding(model), 0.0, attention)  # fmt: skip
    if device.type == "cuda":
        yield from captured_checks(device, models.ours(device))


def _compiled(model: TransformerNP, device: torch.device) -> Callable[..., torch.Tensor]:
    """Returns the model's loss in one graph of `torch.compile`."""
    torch._dynamo.reset()
    # On the CPU Inductor needs a C++ compiler, and interpreted kernels are opaque to it anyway.
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    return torch.compile(model.nll, fullgraph=True, backend=backend)


def _as_near(
    what: str,
    model: TransformerNP,
    nll: Callable[..., torch.Tensor] | None,
    batch: Task,
    loss: torch.Tensor,
    gradients: dict[str, torch.Tensor],
    exact: dict[str, torch.Tensor],
) -> Iterator[Check]:
    """Checks that the model run another way is as near to float64 as the eager `gradients`."""
    found, padded = models.gradients_by_tensor(model, batch, nll)
    own = models.without_padding(padded, exact)
    attention = model.variant.attention
    yield Check(f"all operators of ours, {what}, loss against eager", "abs_error_nats",
                max_abs_error(found, loss), LOSS_BOUND, attention)  # fmt: skip
    for name, reference in exact.items():
        yield Check(f"all operators of ours, {what}, gradient of {name} over the eager one",
                    "error_ratio", error_ratio(own[name], gradients[name], reference),
                    EAGER_BUDGET, attention)  # fmt: skip
