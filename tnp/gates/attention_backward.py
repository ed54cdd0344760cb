"""Phase 3: attention backward in Triton against float64, within PyTorch's error, bit-repeatable."""

from collections.abc import Iterator

import torch

from tnp.gates import attention_cases as cases
from tnp.gates.checks import Check, Unsupported, error_ratio, max_abs_error
from tnp.ops import registry

IMPLEMENTATIONS = ("separate",)
GRADIENT_BUDGET = 3.0
# An error that moves between runs is a race.
REPEATS = {"cuda": 50, "cpu": 1}


def checks(device: torch.device) -> Iterator[Check]:
    for name in IMPLEMENTATIONS:
        try:
            registry.check("attention", name, device, torch.bfloat16)
        except RuntimeError as error:
            raise Unsupported(str(error)) from error
        for case in cases.cases(device):
            inputs, do = cases.draw(case, device)
            first = cases.run(inputs, do, name)
            results = zip(
                ("dq", "dk", "dv"),
                first[1:],
                cases.pytorch_own(inputs, do)[1:],
                cases.reference(inputs, do)[1:],
                strict=True,
            )
            for gradient, kernel, pytorch, exact in results:
                yield Check(
                    f"{gradient} against float64, {case}", "error_ratio",
                    error_ratio(kernel, pytorch, exact), GRADIENT_BUDGET, name,
                )  # fmt: skip
            repeats = REPEATS[device.type]
            difference = max(
                max_abs_error(again, once)
                for _ in range(repeats)
                for again, once in zip(cases.run(inputs, do, name), first, strict=True)
            )
            yield Check(f"repeats: {repeats}, {case}", "max_abs_difference", difference, 0.0, name)
