"""Latency and throughput are two questions: no view pools them or compares one with the other."""

import pytest

from tests.sql.conftest import Store, Tables, gate, one, operator, run, together

PROBLEM = '{"dtype":"bfloat16","op":"swiglu","sizes":{"rows":1,"width":1024}}'


def timed(name: str, ms: float, timing: str | None, **columns: object) -> Tables:
    columns |= {"problem": PROBLEM, "shape": "short", "timing": timing, "bytes": 1e6}
    columns |= {"time_ms_p95": 2 * ms, "time_ms_p99": 3 * ms, "n_samples": 1000}
    of = operator(name, "swiglu", time_ms_p50=ms, **columns)
    of["ops"][0]["config_id"] += f"--{timing}"
    return of


def job(run_id: str, timing: str | None, scale: float, minutes: float = 1) -> Tables:
    """Ours, PyTorch's and a twin of ours, in turn in one process."""
    parts = timed("triton", scale, timing), timed("torch", 2 * scale, timing)
    twin = timed("triton", 1.01 * scale, timing, twin=True, config_id=f"twin--{timing}")
    return run(run_id, *parts, twin, minutes=minutes, timing_hash=timing or "t")


def of(view: str) -> str:
    return f"select * from {view} order by all"


@pytest.mark.parametrize("name", ["throughput", None])
def test_views_of_throughput_are_the_same_with_and_without_latency(store: Store, name) -> None:
    proof = gate("gate")
    alone = store(proof, job("one", name, 1.0))
    views = ("roofline", "operator_speedup", "operator_training", "own_operators", "auto_regret")
    before = {view: alone(of(view)) for view in views}
    both = store(proof, job("one", name, 1.0), job("two", "latency", 5.0, minutes=2))
    assert {view: both(of(view)) for view in views} == before
    (row,) = both("from own_operators")
    assert row["time_ms"] == 1.0 and row["speedup"] == pytest.approx(2.0)


def test_a_latency_is_its_own_question_and_pairs_with_no_throughput(store: Store) -> None:
    query = store(gate("gate"), job("one", None, 1.0), job("two", "latency", 5.0))
    questions = query("select comparison_key, timing from current_ops where not twin")
    assert len({row["comparison_key"] for row in questions}) == 4
    assert {row["comparison_key"].endswith(" latency") for row in questions} == {True, False}
    parts = {row["part"] for row in query("from pairs")}
    assert parts == {"swiglu forward", "swiglu forward latency"}
    mixed = """
        from pairs
        inner join measurements as own on pairs.own = own.code_version
        inner join measurements as base on pairs.base = base.code_version
        where ends_with(own.comparison_key, 'latency') != ends_with(base.comparison_key, 'latency')
    """
    assert query(mixed) == []
    noise = query("select part, n_equals from noise where kind = 'operator' order by part")
    assert [(row["part"], row["n_equals"]) for row in noise] == [
        ("swiglu forward", 1), ("swiglu forward latency", 1)
    ]  # fmt: skip


def test_percentiles_are_medians_over_runs_of_all_launches(store: Store) -> None:
    parts = (job(f"run {n}", "latency", scale, minutes=n) for n, scale in ((1, 4.0), (2, 6.0)))
    query = store(gate("gate"), *parts, job("other", None, 1.0))
    row = one(query, "from latency where implementation = 'triton'")
    assert (row["p50_ms"], row["p95_ms"], row["p99_ms"]) == (5.0, 10.0, 15.0)
    assert (row["n_runs"], row["n_launches"], row["own"], row["valid"]) == (2, 1000, True, True)
    assert one(query, "from latency where implementation = 'torch'")["p50_ms"] == 10.0


def test_a_problem_has_latencies_of_its_newest_policy_alone(store: Store) -> None:
    earlier, later = (job(name, "latency", 1.0, minutes=n) for n, name in enumerate(("a", "b"), 1))
    for row in later["ops"]:
        row["timing_hash"] = "another"
    later["ops"] = [row for row in later["ops"] if row["implementation"] == "triton"]
    query = store(gate("gate"), earlier, later)
    assert {row["implementation"] for row in query("from latency")} == {"triton"}
    assert {row["timing_hash"] for row in query("from latency")} == {"another"}


def test_rows_of_no_latency_are_not_in_it(store: Store) -> None:
    parts = together([job("one", None, 1.0), job("two", "throughput", 1.0)])
    assert store(gate("gate"), parts)("from latency") == []
