"""The checks that operators on rows share: against float64, within PyTorch's error, repeatable."""

from collections.abc import Callable, Iterator

import torch

from tnp.gates.checks import Check, error_ratio, max_abs_error
from tnp.gates.rounding import Floors

# A result that moves between runs is a race.
REPEATS = {"cuda": 20, "cpu": 1}

Results = dict[str, torch.Tensor]  # by name, detached


def compared(
    case: object,
    run: Callable[[], Results],
    own: Results,
    exact: Results,
    budgets: dict[str, float],
    implementation: str = "fused",
    floors: Floors | None = None,
) -> Iterator[Check]:
    """Every result of `run`, of `implementation`, that has a budget; then all again."""
    first = run()
    yield from within(case, first, own, exact, budgets, implementation, floors)
    yield repeated(case, run, first, implementation)


def within(
    case: object,
    results: Results,
    own: Results,
    exact: Results,
    budgets: dict[str, float],
    implementation: str = "fused",
    floors: Floors | None = None,
) -> Iterator[Check]:
    """Every one of `results` that has a budget, against float64, by `error_ratio`."""
    for name, budget in budgets.items():
        if name in results:
            floor = (floors or {}).get(name, 0.0)
            yield Check(f"{name} against float64, {case}", "error_ratio",
                        error_ratio(results[name], own[name], exact[name], floor), budget,
                        implementation)  # fmt: skip


def repeated(
    case: object, run: Callable[[], Results], first: Results, implementation: str = "fused"
) -> Check:
    """`run` gives `first` again, bit by bit."""
    device = next(iter(first.values())).device
    repeats = REPEATS[device.type]
    difference = 0.0
    for _ in range(repeats):
        again = run()
        difference = max(difference, *(max_abs_error(again[name], first[name]) for name in first))
    return Check(
        f"repeats: {repeats}, {case}", "max_abs_difference", difference, 0.0, implementation
    )
