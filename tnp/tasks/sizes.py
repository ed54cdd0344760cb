"""How many points a task or a sample has, where that varies."""

from __future__ import annotations

import numpy as np

from tnp.inputs import require_count

Range = tuple[int, int]  # from, to, both included
Sizes = tuple[int, int]  # context and target points


def draw_sizes(
    seed: int, step: int, *ranges: Range, log: bool = False, together: int | None = None
) -> list[int]:
    """A size of each range: the same for the same (seed, step).

    Args:
        seed, step: what the sizes are a function of.
        ranges: from and to, both included. All sizes between are as likely.
        log: their logarithms are spread evenly instead, so that there are as many tasks of 100 to
            1,000 points as of 1,000 to 10,000.
        together: the most that all sizes may be together. It limits later ones by those before.
    """
    for low, high in ranges:
        require_count("a size", low, at_least=1)
        require_count("the largest size", high, at_least=low)
    if together is not None:
        require_count("together", together, at_least=ranges[0][1] + sum(x for x, _ in ranges[1:]))
    chance, drawn = np.random.default_rng((seed, step)), []
    for low, high in ranges:
        most = high if together is None else min(high, together - sum(drawn))
        if log:
            drawn.append(min(most, int(low * ((most + 1) / low) ** chance.random())))
        else:
            drawn.append(int(chance.integers(low, most, endpoint=True)))
    return drawn


def varying_sizes(vary: dict, seed: int, step: int) -> Sizes:
    """Context and target points, by what config.yaml says of `vary`."""
    rest = {name: value for name, value in vary.items() if name in ("log", "together")}
    n_context, n_target = draw_sizes(seed, step, vary["n_context"], vary["n_target"], **rest)
    return n_context, n_target
