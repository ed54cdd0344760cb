"""Views of joint samples and densities, by values computed by hand."""

from collections.abc import Callable

import pytest

from tests.sql.conftest import NOW, PROVENANCE, SIZES, Query, Tables, gate, one, run
from tests.sql.test_predictions import HASHES, predicted
from tnp.bench.outcome import JOINT_FORMS

TIMES = {"drawn": 0.5, "drawn_anew": 8.0, "trained": 21.0, "trained_plain": 17.5}


def drawn(run_id: str, times: dict[str, float] = TIMES, minutes: float = 5, **columns) -> Tables:
    rows = []
    for form in JOINT_FORMS:
        about = {"config_id": f"joint--mid--fused--{form}", "form": form, "replicate": 1}
        about |= {"study": "joint", "variant": "fused", "operators": '{"mlp": "fused"}'}
        outcome = {"status": "ok", "settled": True}
        outcome |= dict.fromkeys(("time_ms_p50", "time_ms_mean"), times[form])
        waits = {"gates": "proof", "role": "own"}
        rows.append(PROVENANCE | SIZES | about | outcome | HASHES | waits | columns)
    return run(run_id, {"predictions": rows}, minutes=minutes)


def test_ratios_are_of_forms_that_took_turns(store: Callable[..., Query]) -> None:
    query = store(gate("gate"), drawn("one"), predicted("two", minutes=6))
    row = one(query, "from joint_samples")
    assert row["valid"] and row["why_not"] is None and row["n_runs"] == 1
    assert row["sampling_speedup"] == 16 and row["training_cost"] == pytest.approx(1.2)
    # Neither study takes part in the other's view, at the same sizes and of the same variant.
    assert one(query, "from predictions_over_context")["anew_ms"] == 6


def test_what_does_not_count_is_shown_and_says_why(store: Callable[..., Query]) -> None:
    row = one(store(gate("gate", False), drawn("one")), "from joint_samples")
    assert not row["valid"] and row["why_not"].startswith("gate proof is red")
    assert row["anew_ms"] == 8


def test_times_are_medians_of_the_runs_that_count(store: Callable[..., Query]) -> None:
    query = store(
        gate("gate"),
        drawn("one"),
        drawn("two", TIMES | {"drawn": 0.3}, minutes=6),
        drawn("hot", TIMES | {"drawn": 9.0}, minutes=7, throttled=True),
    )
    row = one(query, "from joint_samples")
    assert (row["drawn_ms"], row["n_runs"]) == (pytest.approx(0.4), 2)


def test_a_joint_density_is_that_after_the_last_step(store: Callable[..., Query]) -> None:
    about = PROVENANCE | {"run_id": "r", "variant": "fused", "recorded_at": NOW}
    rows = [about | {"run": "plain", "step": 5, "loss": 1.0}]
    for step, joint in ((5, 0.25), (10, 0.5)):
        columns = {"joint_log_likelihood": joint, "joint_log_likelihood_anew": 0.75}
        rows.append(about | columns | {"run": "buffer", "step": step})
        rows[-1] |= {"joint_difference_stderr": 0.125}
    row = one(store({"training": rows}), "from joint_densities")
    assert (row["run"], row["step"], row["difference"]) == ("buffer", 10, -0.25)
    assert row["standard_error"] == 0.125
