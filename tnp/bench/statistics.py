"""Summarizes timings by seven numbers. Raw samples are stored beside them."""

from collections.abc import Sequence

import numpy as np


def summarize(samples: Sequence[float], prefix: str) -> dict[str, float | None]:
    """Returns `{prefix}_mean`, `_std`, `_min`, `_max`, `_p50`, `_p95` and `_p99` of `samples`.

    `std` is the sample deviation (n − 1), None for a single sample. Percentiles interpolate
    linearly. Nothing is trimmed. Raises ValueError without samples, and for a sample that is not
    finite.
    """
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0:
        raise ValueError(f"no samples to summarize as {prefix!r}: measure at least one")
    if not np.isfinite(values).all():
        raise ValueError(f"samples of {prefix!r} hold {values[~np.isfinite(values)][0]}")
    p50, p95, p99 = np.percentile(values, [50, 95, 99])
    statistics = {
        "mean": values.mean(),
        "std": values.std(ddof=1) if values.size > 1 else None,
        "min": values.min(),
        "max": values.max(),
        "p50": p50,
        "p95": p95,
        "p99": p99,
    }
    return {
        f"{prefix}_{name}": None if value is None else float(value)
        for name, value in statistics.items()
    }
