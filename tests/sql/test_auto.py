"""Tests what `auto` chooses from, and view `auto_regret`: what its choice costs."""

import json
from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.sql.conftest import NOW, SIZES_OF_MLP, Query, both_passes, operator
from tnp.dispatch.registry import AUTO, catalog


def test_a_later_run_without_the_peers_is_for_auto_alone(store: Callable[..., Query]) -> None:
    later = {"recorded_at": NOW + timedelta(hours=1)}
    chosen = {"launch_config": json.dumps({"implementation": "fused", "source": "nearest"})}
    query = store(
        both_passes("sdpa_flash", "attention", 4.0, 4.0),
        both_passes("fa4", "attention", 1.5, 1.5),
        both_passes("fused", "attention", 1.0, 1.0),
        both_passes("sdpa_flash", "attention", 5.0, 5.0, **later),
        operator("fa4", status="unsupported", **later),
        both_passes("fused", "attention", 2.0, 2.0, **later),
        both_passes("auto", "attention", 2.0, 2.2, **later, **chosen),
    )
    (row,) = query("from auto_regret")
    assert (row["best_time_ms"], row["regret"]) == (4.0, pytest.approx(0.05))

    last = {"recorded_at": NOW + timedelta(hours=2)}
    query = store(
        both_passes("fused", "attention", 2.0, 2.0, **later),
        both_passes("auto", "attention", 2.0, 2.2, **later, **chosen),
        both_passes("fused", "attention", 9.0, 9.0, **last),
    )
    (row,) = query("from auto_regret")
    assert (row["best_time_ms"], row["regret"]) == (4.0, pytest.approx(0.05))


def test_the_candidates_of_auto_are_the_catalogs(store: Callable[..., Query]) -> None:
    rows = store()(
        "select op, implementation, rank from implementations where chosen_from order by op, rank"
    )
    expected = [
        {"op": op, "implementation": name, "rank": catalog().listed(op, name).rank}
        for op in sorted(catalog().operators)
        for name in catalog().candidates(op, AUTO)
        if catalog().listed(op, name).own is not None
    ]
    assert rows == expected


def test_what_was_timed_alone_since_takes_no_candidate_from_auto(
    store: Callable[..., Query],
) -> None:
    """As a study of noise does: eight copies of one implementation and nothing else."""
    chose = {"launch_config": json.dumps({"implementation": "fused", "source": "tuned"})}
    alone = {"recorded_at": NOW + timedelta(hours=1), "kernels_hash": "new", "config_id": "alone"}
    query = store(
        both_passes("torch", "mlp", 2.0, 4.0, **SIZES_OF_MLP),
        both_passes("single", "mlp", 3.0, 9.0, **SIZES_OF_MLP),
        both_passes("fused", "mlp", 1.0, 2.0, **SIZES_OF_MLP),
        both_passes("auto", "mlp", 1.0, 2.0, **SIZES_OF_MLP | chose),
        both_passes("fused", "mlp", 1.5, 3.0, **SIZES_OF_MLP | alone),
    )
    (regret,) = query("from auto_regret")
    assert (regret["best_implementation"], regret["regret_of_choice"]) == ("fused", 0)
    assert regret["has_evidence"] is False


def test_regret_is_against_the_best_that_auto_could_choose(store: Callable[..., Query]) -> None:
    def chose(name: str, source: str) -> dict:
        return {"launch_config": json.dumps({"implementation": name, "source": source})}

    odd = {"shape": "odd"}
    query = store(
        both_passes("sdpa_flash", "attention", 2.0, 6.0),
        both_passes("fused", "attention", 1.0, 3.0),
        both_passes("fa4", "attention", 0.5, 1.0),  # a peer: no candidate
        both_passes("auto", "attention", 1.0, 3.2, **chose("fused", "tuned")),
        both_passes("sdpa_flash", "attention", 1.0, 3.0, **odd | {"config_id": "odd-flash"}),
        both_passes("fused", "attention", 1.5, 3.5, **odd | {"config_id": "odd-fused"}),
        both_passes(
            "auto", "attention", 1.5, 3.7, **odd | {"config_id": "o"} | chose("fused", "nearest")
        ),
        both_passes("auto", "mlp", 1.0, 0.0, **chose("fused", "nearest")),
    )
    rows = {(row["op"], row["shape"]): row for row in query("from auto_regret")}
    mid, odd = rows["attention", "mid"], rows["attention", "odd"]
    assert (mid["chosen"], mid["source"], mid["tuned_on"]) == ("fused", "tuned", True)
    assert (mid["best_implementation"], mid["best_time_ms"]) == ("fused", 4.0)
    assert mid["regret"] == pytest.approx(0.05) and mid["regret_of_choice"] == 0
    assert (odd["best_implementation"], odd["tuned_on"]) == ("sdpa_flash", False)
    assert odd["regret"] == pytest.approx(0.3) and odd["regret_of_choice"] == 0.25
    assert rows["mlp", "mid"]["regret"] is None
    # It is one of the others, so it is compared with none of them elsewhere.
    assert query("from operator_speedup where implementation = 'auto'") == []
