"""Pairs, contrasts and verdicts: the formulas against SciPy, and how they judge simulated runs."""

import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from tests.sql.conftest import SQL, Row

Judge = Callable[..., duckdb.DuckDBPyConnection]

MARGIN = np.log(1.01)


@pytest.fixture(scope="module")
def judge(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Judge:
    """Fills timings into a copy of an empty store, and has the statistics' tables read them."""

    def build(*timings: pa.Table) -> duckdb.DuckDBPyConnection:
        path = shutil.copy(empty_store, tmp_path_factory.mktemp("store"))
        connection = duckdb.connect(path)
        connection.register("simulated", pa.concat_tables(timings))
        connection.execute("insert into measurements by name from simulated")
        for table in ("pairs", "estimates", "contrasts"):
            connection.execute((SQL / f"{table}.sql").read_text())
        return connection

    return build


def rows_of(connection: duckdb.DuckDBPyConnection, sql: str) -> list[Row]:
    return connection.sql(sql).to_arrow_table().to_pylist()


def steps(name: str, log_ms: np.ndarray, counts: bool | None = True, n_peers: int = 1) -> pa.Table:
    """Timings of steps from (devices, contenders, sessions, runs).

    The first contender is the baseline, the next `n_peers` are peers; all others are ours.
    """
    axes = [index.ravel() for index in np.indices(log_ms.shape)]
    devices = [f"{name} {i}" for i in axes[0]]
    contenders = [f"{device} {i}" for device, i in zip(devices, axes[1], strict=True)]
    sessions = [f"{device} {i}" for device, i in zip(devices, axes[2], strict=True)]
    constant = {
        "kind": "step",
        "part": "mid",
        "work_key": "mid",
        "flops": 1.0,
        "switches": "",
        "versions": "",
        "study": "matrix",
        "optimizer": True,
    }
    constant |= {"pass": "step", "precision": "", "twin": False, "is_current": True}
    constant |= {"is_timed": True, "is_comparable": True}
    columns = {column: [value] * log_ms.size for column, value in constant.items()} | {
        "device": devices,
        "config_id": contenders,
        "comparison_key": contenders,
        "code_version": contenders,
        "name": contenders,
        "variant": contenders,
        "role": ["baseline" if i == 0 else "peer" if i <= n_peers else "own" for i in axes[1]],
        "valid": pa.array([counts] * log_ms.size, pa.bool_()),
        "session": sessions,
        "run": [" ".join(map(str, (name, *index))) for index in zip(*axes, strict=True)],
        "ordinal": axes[3] + 1,
        "log_ms": log_ms.ravel(),
    }
    return pa.table(columns)


def autocorrelated(
    generator: np.random.Generator, shape: tuple[int, ...], n_samples: int, lag_1: float
) -> np.ndarray:
    """Series of an AR(1) process of standard deviation 1, (*shape, n_samples)."""
    noise = generator.normal(size=(*shape, n_samples))
    series = noise.copy()
    for i in range(1, n_samples):
        series[..., i] = lag_1 * series[..., i - 1] + np.sqrt(1 - lag_1**2) * noise[..., i]
    return series


def simulated(
    generator: np.random.Generator, true_log_ms: np.ndarray, sigma: float, n_sessions: int, n: int
) -> np.ndarray:
    """Medians as processes would measure them, from true values (devices, contenders).

    A session moves all of a device by 2 % and each contender by some 0.2 %, so a ratio by 0.3 %; a
    process differs by `sigma`; its 30 samples by 0.5 %, each as the one before in half of that.
    """
    devices, contenders = true_log_ms.shape
    shape = (devices, contenders, n_sessions, n)
    log_ms = true_log_ms[:, :, None, None] + sigma * generator.normal(size=shape)
    log_ms += 0.02 * generator.normal(size=(devices, 1, n_sessions, 1))
    log_ms += 0.003 / np.sqrt(2) * generator.normal(size=(devices, contenders, n_sessions, 1))
    return log_ms + 0.005 * np.median(autocorrelated(generator, shape, 30, 0.5), axis=-1)


def test_students_tail_agrees_with_scipy(judge: Judge) -> None:
    x, degrees = np.meshgrid(np.linspace(-9, 30, 79), np.arange(2, 60))
    query = "select student_tail(x, degrees) as tail from points"
    connection = judge(steps("none", np.zeros((0, 0, 0, 0))))
    connection.register("points", pa.table({"x": x.ravel(), "degrees": degrees.ravel()}))
    found = connection.sql(query).fetchnumpy()["tail"]
    assert np.abs(found - stats.t.sf(x.ravel(), degrees.ravel())).max() < 1e-15


def test_students_quantile_agrees_with_scipy(judge: Judge) -> None:
    connection = judge(steps("none", np.zeros((0, 0, 0, 0))))
    query = "select degrees, student_quantile(degrees) as t from range(4, 500) as r (degrees)"
    found = connection.sql(query).fetchnumpy()
    assert found["t"] == pytest.approx(stats.t.ppf(0.975, found["degrees"]), rel=4e-4)


def by_hand(differences: np.ndarray, equal_variance: float) -> tuple[float, float, float]:
    """Returns mean, standard error and p of (sessions, runs) differences.

    The formulas stand in docs/store-and-statistics.md.
    """
    n_sessions, n = len(differences), differences.size
    variance = differences.var(ddof=1) if n > 1 else 0.0
    pooled = (4 * equal_variance + (n - 1) * variance) / (n + 3)
    error = np.sqrt(pooled / n + 0.003**2 / n_sessions)
    mean = differences.mean()
    ends = (abs(mean) - MARGIN) / error, (abs(mean) + MARGIN) / error
    return mean, error, sum(stats.t.sf(end, n + 3) for end in ends)


@pytest.mark.parametrize("shape", [(1, 3, 1, 1), (1, 3, 2, 2), (5, 8, 2, 3), (3, 10, 1, 2)])
def test_a_contrast_is_as_computed_by_hand(judge: Judge, shape: tuple[int, ...]) -> None:
    log_ms = np.random.default_rng(1).normal(scale=0.01, size=shape)
    log_ms[:, 2] -= 0.04
    rows = rows_of(judge(steps("gpu", log_ms)), "from contrasts where figure = 'speedup'")
    rows = [row for row in rows if row["own"] != row["base"] and row["against_baseline"]]
    assert len(rows) == shape[0] * (shape[1] - 1)
    for row in rows:
        device, contender = map(int, row["own"].split()[1:])
        successive = np.diff(log_ms[device], axis=-1)
        equal_variance = (successive**2).mean() if successive.size >= 8 else 0.018**2
        mean, error, p = by_hand(log_ms[device, 0] - log_ms[device, contender], equal_variance)
        t = stats.t.ppf(0.975, shape[2] * shape[3] + 3)
        assert row["ratio"] == pytest.approx(np.exp(mean))
        assert row["p"] == pytest.approx(p, abs=1e-12)
        assert row["low"] == pytest.approx(np.exp(mean - t * error), rel=1e-4)
        assert row["high"] == pytest.approx(np.exp(mean + t * error), rel=1e-4)


def test_q_is_benjamini_and_hochbergs_of_a_devices_figure(judge: Judge) -> None:
    generator = np.random.default_rng(2)
    log_ms = generator.normal(scale=0.01, size=(3, 9, 2, 2)) - 0.01 * np.arange(9)[:, None, None]
    rows = rows_of(judge(steps("gpu", log_ms)), "from contrasts where p is not null")
    families = {(row["figure"], row["device"]) for row in rows}
    assert len(families) == 2 * 3
    for family in families:
        of_family = [row for row in rows if (row["figure"], row["device"]) == family]
        q = stats.false_discovery_control([row["p"] for row in of_family])
        assert [row["q"] for row in of_family] == pytest.approx(list(q))


def test_verdicts_need_q_and_an_interval_beyond_one_percent(judge: Judge) -> None:
    precise = np.zeros((1, 12, 2, 4))
    precise[0, :, :] += 1e-4 * np.arange(4)  # what equal runs differ by
    precise[0, 3:7] -= np.array([0.08, -0.08, 0.02, 0.01])[:, None, None]
    rows = rows_of(judge(steps("gpu", precise)), "from contrasts where figure = 'speedup'")
    verdicts = {row["own"]: row["verdict"] for row in rows if row["against_baseline"]}
    assert verdicts["gpu 0 0"] is None  # the baseline itself
    expected = {3: "faster", 4: "slower", 5: "faster", 6: "ambiguous", 7: "same", 1: "same"}
    assert {i: verdicts[f"gpu 0 {i}"] for i in expected} == expected
    assert all(row["q"] < 0.05 for row in rows if row["verdict"] in ("faster", "slower"))


def test_one_run_says_that_half_the_time_is_faster_and_decides_nothing_of_three_percent(
    judge: Judge,
) -> None:
    log_ms = -np.array([0.0, 0.0, np.log(2), 0.03])[None, :, None, None]
    rows = rows_of(judge(steps("gpu", log_ms)), "from contrasts where figure = 'speedup'")
    verdicts = {row["own"]: row["verdict"] for row in rows if row["against_baseline"]}
    assert (verdicts["gpu 0 2"], verdicts["gpu 0 3"]) == ("faster", "ambiguous")


def test_rows_without_evidence_have_a_ratio_and_no_verdict(judge: Judge) -> None:
    log_ms = -np.array([0.0, 0.0, np.log(2)])[None, :, None, None] * np.ones((1, 3, 1, 2))
    (row,) = rows_of(
        judge(steps("gpu", log_ms, counts=None)),
        "from contrasts where own = 'gpu 0 2' and base = 'gpu 0 0'",
    )
    assert row["ratio"] == pytest.approx(2)
    assert [row[name] for name in ("low", "high", "p", "q", "verdict")] == [None] * 5


def test_pairs_with_evidence_leave_out_those_without(judge: Judge) -> None:
    half = -np.array([0.0, 0.0, np.log(2)])[None, :, None, None]
    third = -np.array([0.0, 0.0, np.log(3)])[None, :, None, None]
    later = steps("gpu", third)
    later = later.set_column(
        later.schema.get_field_index("session"), "session", pa.array(["later"] * 3)
    )
    (row,) = rows_of(
        judge(steps("gpu", half, counts=None), later),
        "from contrasts where own = 'gpu 0 2' and base = 'gpu 0 0'",
    )
    assert (row["n_pairs"], row["ratio"]) == (1, pytest.approx(3))
    assert row["verdict"] == "faster"


def test_the_best_is_the_fastest_within_the_sessions_that_it_shares(judge: Judge) -> None:
    """A session that is slower for everyone makes nobody the best who was not in it."""
    log_ms = np.zeros((1, 3, 2, 1))
    log_ms[0, :, 1] += 0.2
    log_ms[0, 1] -= 0.1  # the peer is faster than the baseline
    log_ms[0, 2] -= 0.3
    table = steps("gpu", log_ms)
    absent = [i for i, row in enumerate(table.to_pylist()) if row["run"] == "gpu 0 1 0 0"]
    table = table.take([i for i in range(len(table)) if i not in absent])
    rows = rows_of(judge(table), "from contrasts where own = 'gpu 0 2' and figure = 'speedup'")
    (best,) = [row for row in rows if row["against_best"]]
    assert (best["base"], best["ratio"]) == ("gpu 0 1", pytest.approx(np.exp(0.2)))


def test_a_base_of_a_faster_session_does_not_replace_the_one_timed_beside(judge: Judge) -> None:
    """The peer is faster by all its runs than the baseline, which a fast session alone has."""
    log_ms = np.zeros((1, 3, 2, 2))
    log_ms[0, :, 1] += 0.2
    log_ms[0, 1] -= 0.1
    log_ms[0, 2] -= 0.3
    absent = "gpu 0 0 1 0", "gpu 0 0 1 1", "gpu 0 1 1 1", "gpu 0 2 0 0", "gpu 0 2 0 1"
    best = best_of(judge, steps("gpu", log_ms), "gpu 0 2", lambda run: run not in absent)
    assert (best["base"], best["ratio"]) == ("gpu 0 1", pytest.approx(np.exp(0.2)))


@pytest.mark.parametrize("counts", [True, None])
def test_a_base_that_pairs_and_medians_rank_otherwise_is_not_the_slowest(
    judge: Judge, counts: bool | None
) -> None:
    """Pairs rank peer 1 before 2, medians 2 before 3 and 3 before 1: one must remain."""
    log_ms = np.zeros((1, 5, 3, 2))
    log_ms[0] += np.array([1.0, 0.0, 0.02, -0.03, -0.3])[:, None, None]
    log_ms[0, :, 1] -= 0.1
    table = steps("gpu", log_ms, counts, n_peers=3)
    present = {"0 0", "1 0", "4 0", "2 1 0", "4 1 0", "3 2"}
    best = best_of(
        judge, table, "gpu 0 4", lambda run: any(run.startswith(f"gpu 0 {at}") for at in present)
    )
    assert (best["base"], best["ratio"]) == ("gpu 0 3", pytest.approx(np.exp(0.27)))
    assert best["verdict"] is None


def best_of(judge: Judge, table: pa.Table, own: str, keep: Callable[[str], bool]) -> Row:
    """Returns the contrast of `own` with the fastest base, in the runs that are kept."""
    kept = [i for i, row in enumerate(table.to_pylist()) if keep(row["run"])]
    (best,) = rows_of(
        judge(table.take(kept)),
        f"from contrasts where own = '{own}' and figure = 'speedup' and against_best",
    )
    return best


TRUE_DIFFERENCES = np.array([0.0, 0.0, 0.0, 0.03, 0.0, -0.03, 0.0, 0.1, -0.2, 0.03])
SIGMAS = (0.0042, 0.0123)
SIMULATED = """
    select
        *,
        cast(split_part(own, ' ', -1) as integer) as contender,
        truths[contender + 1] as truth,
        ln(low) <= truth and ln(high) >= truth as covered,
        (ln(high) - ln(low)) / 2 as half_width
    from contrasts, (select $truths as truths)
    where figure = 'speedup' and against_baseline and own != base and starts_with(device, $name)
"""


@pytest.fixture(scope="module")
def judged(judge: Judge) -> Callable[[str], list[Row]]:
    """Simulated contrasts: 100 devices for each σ, number of sessions and of runs in each."""
    generator = np.random.default_rng(12)
    true_log_ms = np.tile(-TRUE_DIFFERENCES, (100, 1))
    connection = judge(
        *(
            steps(
                f"{sigma}/{n_sessions}/{n}",
                simulated(generator, true_log_ms, sigma, n_sessions, n),
            )
            for sigma, n_sessions, n in product(SIGMAS, (1, 2), (1, 2, 3))
        )
    )

    def rows(name: str) -> list[Row]:
        parameters = {"truths": list(TRUE_DIFFERENCES), "name": name}
        return connection.sql(SIMULATED, params=parameters).to_arrow_table().to_pylist()

    return rows


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("n_sessions", [1, 2])
@pytest.mark.parametrize("sigma", SIGMAS)
def test_intervals_contain_the_truth(
    judged: Callable[[str], list[Row]], sigma: float, n_sessions: int, n: int
) -> None:
    rows = judged(f"{sigma}/{n_sessions}/{n}")
    assert len(rows) == 900
    assert np.mean([row["covered"] for row in rows]) >= 0.93


def test_verdicts_are_right(judged: Callable[[str], list[Row]]) -> None:
    rows = judged("")
    called = [row for row in rows if row["verdict"] in ("faster", "slower")]
    false = [row for row in called if row["truth"] == 0]
    assert len(false) <= 0.001 * sum(row["truth"] == 0 for row in rows)
    assert all((row["truth"] > 0) == (row["verdict"] == "faster") for row in called if row["truth"])
    same = [row for row in rows if row["verdict"] == "same"]
    assert same and all(row["truth"] == 0 for row in same)


def test_two_sessions_of_two_runs_tell_three_percent(judged: Callable[[str], list[Row]]) -> None:
    small, large = (judged(f"{sigma}/2/2") for sigma in SIGMAS)
    assert np.median([row["half_width"] for row in small]) <= 0.010
    assert np.median([row["half_width"] for row in large]) <= 0.022
    three = [row for row in small if abs(row["truth"]) == 0.03]
    assert np.mean([row["verdict"] in ("faster", "slower") for row in three]) >= 0.95


def test_equal_things_are_judged_as_all_others_are(judge: Judge) -> None:
    generator = np.random.default_rng(3)
    equal = simulated(generator, np.zeros((40, 2)), SIGMAS[1], 1, 6)
    rows = rows_of(judge(steps("gpu", equal)), "from noise_verdicts")
    n_comparisons = sum(row["n_comparisons"] for row in rows)
    assert n_comparisons == 40 * 2 * 15
    assert sum(row["n_called"] for row in rows) <= 0.01 * n_comparisons
    assert sum(row["n_containing"] for row in rows) >= 0.93 * n_comparisons


def test_noise_is_what_was_simulated(judge: Judge) -> None:
    generator = np.random.default_rng(4)
    log_ms = 0.01 * generator.normal(size=(1, 30, 4, 5))
    log_ms[:, 2:] += 0.02 * generator.normal(size=(1, 28, 4, 1))
    (row,) = rows_of(judge(steps("gpu", log_ms)), "from noise")
    assert (row["n_runs"], row["n_successive"], row["n_equals"]) == (600, 480, 480)
    assert row["between_runs"] == pytest.approx(0.01, rel=0.1)
    assert row["of_equals"] == pytest.approx(np.sqrt(2) * 0.01, rel=0.1)
    # A ratio has 2 % of the contender's own and the noise of two times five runs.
    assert row["between_sessions"] == pytest.approx(np.hypot(0.02, 0.01 * np.sqrt(2 / 5)), rel=0.1)


def test_undecided_asks_for_as_many_runs_as_decide_and_no_more(judge: Judge) -> None:
    generator = np.random.default_rng(5)
    log_ms = 0.005 * generator.normal(size=(1, 12, 1, 3))
    log_ms[0, 2:] -= np.linspace(-0.03, 0.03, 10)[:, None, None]
    rows = rows_of(judge(steps("gpu", log_ms)), "from undecided where figure = 'speedup'")
    wanted = [row for row in rows if row["n_more_runs"] is not None]
    assert len(wanted) > 3 and any(row["n_more_runs"] > 1 for row in wanted)
    for row in wanted:
        mean, n = np.log(row["ratio"]), row["n_pairs"]
        error = (np.log(row["high"]) - mean) / stats.t.ppf(0.975, n + 3)
        more = np.arange(row["n_more_runs"] + 1)
        later_error = np.sqrt((error**2 - 0.003**2) * n / (n + more) + 0.003**2 / 2)
        half_width = stats.t.ppf(0.975, n + more + 3) * later_error
        decided = half_width < abs(abs(mean) - MARGIN)
        assert decided[-1] and not decided[1:-1].any()
