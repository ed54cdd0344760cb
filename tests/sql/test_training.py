"""Views of training runs, by values computed by hand."""

from collections.abc import Callable
from datetime import timedelta

import numpy as np
import pytest

from tests.sql.conftest import NOW, PROVENANCE, Query, Tables


def training_run(run: str, losses: list[float], **columns: object) -> Tables:
    """Logged every 50 steps."""
    row = PROVENANCE | {"config_id": run, "run": run, "variant": run, "seed": 0, "batch": 64}
    row |= {"learning_rate": 1e-4}
    row |= {"source": "gaussian_process", "n_context": 64, "n_target": 500, "dtype": "bfloat16"}
    rows = [row | {"step": 50 * (i + 1), "loss": loss} for i, loss in enumerate(losses)]
    return {"training": [row | columns for row in rows]}


def test_training_is_equivalent_within_the_margin_of_the_null_pair(
    store: Callable[..., Query],
) -> None:
    noise = np.random.default_rng(0).normal(0, 0.01, 20)
    loss = np.linspace(2.0, 1.0, 20)
    warmed_up_otherwise = training_run("gp_small_warm", list(loss))
    warmed_up_otherwise["training"][0]["learning_rate"] = 5e-5
    query = store(
        training_run("gp_small_sdpa", list(loss)),
        training_run("gp_small_flash", list(loss + 0.005)),  # so the margin is 0.015
        training_run("gp_small_fused", list(loss + noise)),
        training_run("gp_small_worse", list(loss + 0.04 + noise)),
        training_run("gp_small_other", list(loss), seed=1),
        training_run("gp_small_faster", list(loss), learning_rate=3e-4),
        warmed_up_otherwise,
    )
    rows = {row["run"]: row for row in query("from training_equivalence")}
    assert set(rows) == {"gp_small_flash", "gp_small_fused", "gp_small_worse"}
    fused, last = rows["gp_small_fused"], noise[10:]
    assert (fused["n_rows"], fused["first_step"], fused["last_step"]) == (10, 550, 1000)
    assert fused["margin"] == pytest.approx(0.015)
    assert fused["mean_difference"] == pytest.approx(last.mean())
    error = last.std(ddof=1) / np.sqrt(10)
    assert fused["standard_error"] == pytest.approx(error)
    assert fused["difference_high"] == pytest.approx(last.mean() + 1.833 * error, abs=1e-5)
    assert fused["equivalent"] is True and rows["gp_small_worse"]["equivalent"] is False
    null_pair = rows["gp_small_flash"]
    assert null_pair["is_null_pair"] and null_pair["equivalent"] is None


def test_training_is_not_compared_where_pytorch_differs_from_itself(
    store: Callable[..., Query],
) -> None:
    query = store(
        training_run("gp_small_sdpa", [-0.69] * 20),
        training_run("gp_small_flash", [-0.55] * 20),
        training_run("gp_small_fused", [-0.69] * 20),
    )
    for row in query("from training_equivalence"):
        assert (row["margin"], row["equivalent"]) == (None, None)


def test_training_without_a_null_pair_has_the_least_margin(store: Callable[..., Query]) -> None:
    query = store(
        training_run("gp_small_sdpa", [2.0, 1.5, 1.0, 0.9]),
        training_run("gp_small_fused", [2.0, 1.5, 1.0, 0.9]),
        training_run("gp_small_short", [2.0]),  # one difference has no interval
    )
    (row,) = query("from training_equivalence")
    assert (row["margin"], row["n_rows"], row["equivalent"]) == (0.01, 2, True)


def test_gap_closed_runs_from_prior_to_exact(store: Callable[..., Query]) -> None:
    row = PROVENANCE | {"run": "gp", "step": 100, "heldout_log_likelihood": 0.5}
    row |= {"prior_log_likelihood": -1.0, "exact_log_likelihood": 1.0}
    images = row | {"run": "images", "exact_log_likelihood": None}
    later = {"recorded_at": NOW + timedelta(hours=1)}
    query = store(
        {"training": [row | {"step": 900}, images]},
        {"training": [row | later, row | later | {"step": 200, "heldout_log_likelihood": 1.0}]},
    )
    rows = query("select run, step, gap_closed from training_curves order by all")
    assert [tuple(row.values()) for row in rows] == [
        ("gp", 100, 0.75),
        ("gp", 200, 1.0),
        ("images", 100, None),
    ]


@pytest.mark.parametrize(
    "shuffled, stderr, nats",
    [(0.5, 0.2, 0.5), (0.5, 0.3, None), (1.5, 0.1, None), (0.5, None, 0.5), (None, 0.1, None)],
)
def test_context_gains_what_is_beyond_two_standard_errors(
    store: Callable[..., Query], shuffled: float | None, stderr: float | None, nats: float | None
) -> None:
    heldout = {"heldout_log_likelihood": 1.0, "heldout_log_likelihood_shuffled": shuffled}
    query = store(training_run("gp", [1.0], **heldout, heldout_log_likelihood_stderr=stderr))
    (row,) = query("from training_curves")
    assert row["nats_from_context"] == nats
