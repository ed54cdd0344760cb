"""Checks phase 1: the PyTorch model is right, it trains, and the named backend runs."""

from collections.abc import Iterator

import torch

from tnp.gates import models
from tnp.gates.checks import Check, max_abs_error, relative_error
from tnp.model.prediction import bytes_per_target
from tnp.model.variants import Variant
from tnp.train.step import TrainingStep

N_STEPS = 60


def checks(device: torch.device) -> Iterator[Check]:
    chosen = models.scale(device)
    eps = torch.finfo(chosen.dtype).eps
    for name in models.implementations(device):
        if not name.startswith("sdpa_"):
            continue
        variant = Variant(name, attention=name)
        model, batch = models.build_model(device, variant), models.task(device, 0)
        yield from _one_implementation(name, model, batch, eps)

        step = TrainingStep(model, learning_rate=models.scale(device).learning_rate)
        losses = torch.stack([step(batch) for _ in range(N_STEPS)])
        fall = (losses[0] - losses[-1]).item()
        yield Check(f"loss falls in {N_STEPS} steps on one task", "nats", fall, 0.1, name, True)
        yield from _padding(device, name, chosen.d_ff_storage, eps)


def _one_implementation(name, model, batch, eps) -> Iterator[Check]:
    arguments = (batch.x_context, batch.y_context, batch.x_target)
    out = model(*arguments)
    expected = {"sdpa_flash": "flash", "sdpa_cudnn": "cudnn"}[name]
    ran = _sdpa_backends(out)
    yield Check(
        f"SDPA backend that ran: {', '.join(sorted(ran)) or 'none'}",
        "is the one named",
        float(bool(ran) and all(expected in backend_name.lower() for backend_name in ran)),
        1.0,
        name,
        larger_is_better=True,
    )

    exact = models.exact(model)
    reference = exact(*(argument.double() for argument in arguments))
    # Rounding errors of some ten layers of matmuls add like a random walk.
    yield Check("mixture parameters, model against float64", "relative_error",
                relative_error(out, reference), 8 * eps, name)  # fmt: skip
    five = 5 * batch.batch * bytes_per_target(model)
    predicted = model.predict(batch.context, batch.x_target, max_bytes=five)
    loss = -predicted.log_prob(batch.y_target).mean()
    yield Check("predict in chunks of 5, loss against the model's", "abs_error_nats",
                max_abs_error(loss, model.loss(batch)), 8 * eps, name)  # fmt: skip


def _padding(device, name, d_ff_storage, eps) -> Iterator[Check]:
    plain = models.build_model(device, Variant("plain", attention=name))
    padded = models.build_model(
        device, Variant("padded", attention=name, d_ff_storage=d_ff_storage)
    )
    steps = [
        TrainingStep(model, learning_rate=models.scale(device).learning_rate)
        for model in (plain, padded)
    ]
    losses = [models.train(step, device, 3) for step in steps]
    yield Check(f"hidden width padded to {d_ff_storage}: losses of 3 steps", "max_abs_error",
                max_abs_error(losses[1], losses[0]), 8 * eps, name)  # fmt: skip
    yield Check("padding after 3 optimizer steps", "max_abs_value", models.padding(padded), 0.0,
                name)  # fmt: skip


def _sdpa_backends(out: torch.Tensor) -> set[str]:
    """Returns names of the SDPA backward nodes behind `out`, which tell the backend."""
    found, seen, stack = set(), set(), [out.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "ScaledDotProduct" in node.name():
            found.add(node.name())
        stack += [parent for parent, _ in node.next_functions]
    return found
