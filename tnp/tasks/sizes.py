"""Draws how many points a task or a sample has, if sizes vary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tnp.util.checks import require_count

Range = tuple[int, int]  # from, to, both included
Sizes = tuple[int, int]  # context and target points


def require_range(name: str, limits: Range) -> Range:
    """Returns the smallest and the largest number of points as ints, or raises ValueError."""
    if not isinstance(limits, Sequence) or isinstance(limits, str) or len(limits) != 2:
        raise ValueError(
            f"{name} is {limits!r}: it must be the smallest and the largest number, such as (3, 64)"
        )
    low = require_count(f"the smallest {name}", limits[0], at_least=1)
    return low, require_count(f"the largest {name}", limits[1], at_least=low)


def draw_sizes(
    seed: int, step: int, *ranges: Range, log: bool = False, together: int | None = None
) -> list[int]:
    """Draws a size from each range, equal for equal (seed, step).

    Args:
        seed, step: decide the sizes.
        ranges: pairs (from, to), both included. All sizes are equally likely.
        log: whether logarithms of sizes are spread evenly instead. Then as many tasks have 100 to
            1,000 points as 1,000 to 10,000.
        together: the largest sum of all sizes. Earlier sizes limit later ones.
    """
    seed, step = (require_count(*given, 0) for given in (("seed", seed), ("step", step)))
    ranges = tuple(require_range("size", limits) for limits in ranges)
    if together is not None:
        least = ranges[0][1] + sum(low for low, _ in ranges[1:])
        together = require_count("together", together, least)
    chance, drawn = np.random.default_rng((seed, step)), []
    for low, high in ranges:
        most = high if together is None else min(high, together - sum(drawn))
        if log:
            drawn.append(min(most, int(low * ((most + 1) / low) ** chance.random())))
        else:
            drawn.append(int(chance.integers(low, most, endpoint=True)))
    return drawn


def varying_sizes(vary: dict, seed: int, step: int) -> Sizes:
    """Returns context and target points, as `vary` of config.yaml says."""
    rest = {name: value for name, value in vary.items() if name in ("log", "together")}
    n_context, n_target = draw_sizes(seed, step, vary["n_context"], vary["n_target"], **rest)
    return n_context, n_target
