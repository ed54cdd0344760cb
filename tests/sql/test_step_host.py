"""Tests view step_host: the host's time for a training step, by values computed by hand."""

from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.sql.conftest import NOW, PROVENANCE, Query, Row, Tables

SIZES = {"shape": "small", "batch": 64, "n_context": 64, "n_target": 500, "dtype": "bfloat16"}
ROLES = {"sdpa_flash": "baseline", "pytorch_best": "peer"}


def measured(
    run_id: str,
    forms: dict[tuple[str, bool], tuple[float, float] | str],
    minutes: float = 0,
    commit: str = "a",
    processor: str = "Xeon",
    spec: str = "s",
) -> Tables:
    """A run from {(variant, cuda_graph): (host's ms, ms in a loop) or the status}."""
    environment = PROVENANCE | {"environment_id": run_id, "recorded_at": NOW}
    environment |= {"git_commit": commit, "processor": processor, "cpu_count": 16}
    at = {"environment_id": run_id, "recorded_at": NOW + timedelta(minutes=minutes)}
    rows: list[Row] = []
    for (variant, graph), found in forms.items():
        row = PROVENANCE | at | SIZES | {"run_id": run_id, "variant": variant, "cuda_graph": graph}
        row |= {"role": ROLES.get(variant, "own"), "spec_hash": spec}
        if isinstance(found, str):
            rows.append(row | {"status": found, "reason": f"because {found}"})
        else:
            rows.append(row | {"status": "ok", "host_ms_p50": found[0], "step_ms_p50": found[1]})
    return {"host_steps": rows, "environments": [environment]}


def of_form(query: Query, variant: str, graph: bool = False) -> Row:
    found = query(f"select * from step_host where variant = '{variant}' and cuda_graph = {graph}")
    (row,) = found
    return row


def test_a_step_is_held_against_pytorch_s_fastest_launched_form_and_its_own_graph(
    store: Callable[..., Query],
) -> None:
    first = {
        ("sdpa_flash", False): (40.0, 41.0), ("pytorch_best", False): (10.0, 20.0),
        ("fused", False): (20.0, 21.0), ("pytorch_best", True): (0.1, 19.0),
        ("fused", True): (0.2, 15.0),
    }  # fmt: skip
    second = first | {("fused", False): (40.0, 45.0)}
    query = store(measured("1", first), measured("2", second, minutes=1))
    ours = of_form(query, "fused")
    assert (ours["host_ms"], ours["step_ms"], ours["n_runs"]) == (30.0, 33.0, 2)
    assert ours["pytorch_variant"] == "pytorch_best" and ours["waits_for_host"]
    assert ours["over_pytorch"] == 3.0  # the median of 2 and 4, each within its run
    assert ours["over_graph"] == pytest.approx((21 / 15 + 45 / 15) / 2)
    assert not of_form(query, "pytorch_best")["waits_for_host"]
    assert of_form(query, "fused", graph=True)["over_graph"] is None


def test_runs_of_an_earlier_commit_and_of_another_processor_are_not_pooled(
    store: Callable[..., Query],
) -> None:
    form = ("fused", False)
    query = store(
        measured("old", {form: (90.0, 90.0)}, commit="old"),
        measured("other model", {form: (50.0, 50.0)}, spec="other"),
        measured("1", {form: (20.0, 21.0)}, minutes=1),
        measured("2", {form: (12.0, 16.0)}, minutes=2, processor="EPYC"),
    )
    rows = query("select processor, host_ms, over_pytorch from step_host order by processor")
    assert rows == [
        {"processor": "EPYC", "host_ms": 12.0, "over_pytorch": None},
        {"processor": "Xeon", "host_ms": 20.0, "over_pytorch": None},
    ]


def test_a_commit_that_timed_nothing_hides_no_times_and_a_form_that_cannot_run_says_why(
    store: Callable[..., Query],
) -> None:
    query = store(
        measured("1", {("fused", False): (20.0, 21.0), ("fused", True): "unsupported"}),
        measured("2", {("fused", False): "timeout"}, minutes=1, commit="b"),
    )
    assert of_form(query, "fused")["host_ms"] == 20.0
    graph = of_form(query, "fused", graph=True)
    assert (graph["status"], graph["reason"]) == ("unsupported", "because unsupported")
    assert graph["host_ms"] is None and graph["n_runs"] == 0
