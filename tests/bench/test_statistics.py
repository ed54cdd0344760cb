import math

import pytest

from tnp.bench.statistics import summarize
from tnp.store.schemas import STATISTICS


def test_known_numbers():
    row = summarize([float(n) for n in range(1, 101)], "step_ms")
    assert list(row) == [f"step_ms_{name}" for name in STATISTICS]
    assert row["step_ms_mean"] == row["step_ms_p50"] == 50.5
    assert row["step_ms_std"] == pytest.approx(math.sqrt(100 * 101 / 12))
    assert (row["step_ms_min"], row["step_ms_max"]) == (1.0, 100.0)
    assert row["step_ms_p95"] == pytest.approx(95.05)
    assert row["step_ms_p99"] == pytest.approx(99.01)


def test_an_outlier_is_kept():
    row = summarize([1.0] * 29 + [1000.0], "time_ms")
    assert row["time_ms_max"] == 1000.0
    assert row["time_ms_p50"] == 1.0
    assert summarize([3.0], "time_ms")["time_ms_std"] is None


@pytest.mark.parametrize("samples", [[], [1.0, math.nan], [math.inf]])
def test_nothing_and_nonsense_are_refused(samples):
    with pytest.raises(ValueError, match="time_ms"):
        summarize(samples, "time_ms")
