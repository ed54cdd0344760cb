"""Phase 3: dK/dV and dQ without atomics against float64, within budget, bit-repeatable."""

from collections.abc import Iterator

import torch

from tnp.contract import Operation
from tnp.gates import attention_cases as cases
from tnp.gates.attention_forward import REPEATS
from tnp.gates.checks import Check, distance, error_ratio, max_abs_error, require_ours
from tnp.ops.attention import SEPARATE

GRADIENTS = ("dq", "dk", "dv")


def checks(device: torch.device) -> Iterator[Check]:
    yield from gradient_checks(device, SEPARATE, repeatable=GRADIENTS)


def gradient_checks(
    device: torch.device, operation: Operation, repeatable: tuple[str, ...]
) -> Iterator[Check]:
    """Every kernel of a backward operation; those of its gradients that must repeat bit by bit.

    The others may differ from run to run by the rounding of a sum's order: by less than the result
    is off from float64.
    """
    require_ours(device)
    implementation = operation.name.rpartition(".")[2]
    for case in cases.cases(device):
        inputs, do = cases.draw(case, device)
        pytorch = cases.pytorch_own(case, inputs, do)[1:]
        exact = cases.reference(case, inputs, do)[1:]
        floors = cases.floors(case, inputs, do)
        for kernel, config in cases.launches(operation, case, inputs):
            first = cases.backward(case, inputs, do, operation, kernel, config)
            for name, ours, own, reference in zip(GRADIENTS, first, pytorch, exact, strict=True):
                yield Check(f"{kernel}: {name} against float64, {case}", "error_ratio",
                            error_ratio(ours, own, reference, floors[name]), cases.BUDGETS[name],
                            implementation)  # fmt: skip
            repeats = REPEATS[device.type]
            differences = dict.fromkeys(GRADIENTS, 0.0)
            for _ in range(repeats):
                again = cases.backward(case, inputs, do, operation, kernel, config)
                for name, ours, once in zip(GRADIENTS, again, first, strict=True):
                    differences[name] = max(differences[name], max_abs_error(ours, once))
            for name, once, reference in zip(GRADIENTS, first, exact, strict=True):
                moving = name not in repeatable and kernel == "hopper"
                bound = distance(once, reference) if moving else 0.0
                yield Check(f"{kernel}: {name} repeats: {repeats}, {case}", "max_abs_difference",
                            differences[name], bound, implementation)  # fmt: skip
