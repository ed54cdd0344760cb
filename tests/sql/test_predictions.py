"""Tests the view of predictions over one context against values computed by hand."""

from collections.abc import Callable

import pytest

from tests.sql.conftest import PROVENANCE, SIZES, Query, Tables, gate, one, run
from tnp.bench.outcome import FORMS

TIMES = {"anew": 6.0, "encode": 5.0, "kept": 2.0, "replayed": 0.75, "bare": 0.5}
HASHES = {"kernels_hash": "k", "source_hash": "m", "spec_hash": "s", "timing_hash": "t"}


def predicted(
    run_id: str, times: dict[str, float] = TIMES, minutes: float = 5, **columns
) -> Tables:
    """One run of all forms; those without a time could not be measured."""
    rows = []
    for form in FORMS:
        about = {"config_id": f"predictions--mid--fused--{form}", "form": form, "replicate": 1}
        about |= {"study": "predictions", "variant": "fused", "operators": '{"mlp": "fused"}'}
        outcome = {"status": "unsupported", "reason": "it is not there"}
        if form in times:
            outcome = {"status": "ok", "time_ms_p50": times[form], "time_ms_mean": times[form]}
            outcome |= {"settled": True, "compile_s": 0.015}
            outcome |= {"max_relative_error": 1e-7} if form in ("kept", "replayed") else {}
        waits = {"gates": "proof", "role": "own"}
        rows.append(PROVENANCE | SIZES | about | outcome | HASHES | waits | columns)
    return run(run_id, {"predictions": rows}, minutes=minutes)


def test_ratios_are_of_forms_that_took_turns(store: Callable[..., Query]) -> None:
    row = one(store(gate("gate"), predicted("one")), "from predictions_over_context")
    assert row["valid"] and row["why_not"] is None and row["n_runs"] == 1
    assert (row["kept_speedup"], row["replayed_speedup"]) == (3, 8)
    assert row["replayed_over_bare"] == 1.5
    assert row["hundred_speedup"] == pytest.approx(600 / (5 + 15 + 98 * 0.75))
    assert row["max_relative_error"] == 1e-7


def test_times_are_medians_of_the_runs_that_count(store: Callable[..., Query]) -> None:
    query = store(
        gate("gate"),
        predicted("one", TIMES | {"kept": 1.0}),
        predicted("two", TIMES | {"kept": 3.0}, minutes=6),
        predicted("hot", TIMES | {"kept": 100.0}, minutes=7, throttled=True),
    )
    row = one(query, "from predictions_over_context")
    assert (row["valid"], row["kept_ms"], row["n_runs"]) == (True, 2.0, 2)


@pytest.mark.parametrize(
    ("proof", "columns", "why_not"),
    [
        ([], {}, "gate proof has not run on this code"),
        ([gate("gate", False)], {}, "gate proof is red"),
        ([gate("gate")], {"settled": False}, "the samples were not precise enough"),
    ],
)
def test_what_does_not_count_is_shown_and_says_why(
    store: Callable[..., Query], proof: list[Tables], columns: dict, why_not: str
) -> None:
    row = one(store(*proof, predicted("one", **columns)), "from predictions_over_context")
    assert not row["valid"] and row["why_not"].startswith(why_not)
    assert row["anew_ms"] == 6.0


def test_forms_that_a_device_cannot_run_have_no_time(store: Callable[..., Query]) -> None:
    times = {form: TIMES[form] for form in ("anew", "encode", "kept")}
    row = one(store(gate("gate"), predicted("one", times)), "from predictions_over_context")
    assert row["valid"] and row["kept_speedup"] == 3
    assert row["replayed_ms"] is row["replayed_over_bare"] is row["hundred_speedup"] is None
