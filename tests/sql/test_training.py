"""Views of training runs, by values computed by hand."""

import json
import math
from collections.abc import Callable, Sequence
from datetime import timedelta

import numpy as np
import pytest

from tests.sql.conftest import NOW, PROVENANCE, Query, Tables, check, one, runs


def training_run(run: str, losses: list[float], **columns: object) -> Tables:
    """Logged every 50 steps, and compared with `gp_small_sdpa`, which is compared with none."""
    row = PROVENANCE | {"config_id": run, "run": run, "variant": run, "seed": 0, "batch": 64}
    row |= {"baseline": "" if run == "gp_small_sdpa" else "gp_small_sdpa"}
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


def test_early_rows_name_no_baseline_and_are_compared_as_they_were(
    store: Callable[..., Query],
) -> None:
    losses, early = [2.0, 1.5, 1.0, 0.9], {"baseline": None}
    query = store(
        training_run("gp_small_sdpa", losses, variant="sdpa_cudnn_padded", **early),
        training_run("gp_small_fused", losses, **early),
        training_run("gp_other", losses, **early),
    )
    row = one(query, "from training_equivalence")
    assert (row["run"], row["baseline_variant"]) == ("gp_small_fused", "sdpa_cudnn_padded")


def test_a_curve_is_compared_with_no_run_of_another_model(store: Callable[..., Query]) -> None:
    losses = [2.0, 1.5, 1.0, 0.9]
    query = store(
        training_run("gp_small_sdpa", losses, recipe='{"model": 1}'),
        training_run("gp_small_fused", losses, recipe='{"model": 2}'),
    )
    assert query("from training_equivalence") == []


RECIPE = {"source": "images", "batch": 4, "n_context": 9, "n_target": 3, "steps": 100}
SEEDS = range(5)
DIFFERENCES = 0.001, -0.002, 0.003, 0.0, 0.002


def seed_runs(
    variant: str,
    likelihoods: Sequence[float | None],
    seeds: Sequence[int] = SEEDS,
    recipe: dict = RECIPE,
    **columns: object,
) -> list[Tables]:
    """A run for each likelihood at the end. One whose likelihood is None diverged after a step."""
    runs = []
    for seed, likelihood in zip(seeds, likelihoods, strict=True):
        last = {"step": recipe["steps"], "heldout_log_likelihood": likelihood, "loss": 0.1}
        if likelihood is None:
            last = {"step": 1, "heldout_log_likelihood": math.nan, "loss": math.nan}
        row = PROVENANCE | {"run": f"{variant}_{seed}", "variant": variant, "seed": seed}
        row |= {"recipe": json.dumps(recipe), "operators": json.dumps({"mlp": "e4m3"})}
        row |= {"heldout_coverage": 0.9, "baseline": "fused" if variant != "fused" else ""}
        first = {"step": 0, "heldout_log_likelihood": -1.0, "loss": None}
        runs.append({"training": [row | first | columns, row | last | columns]})
    return runs


FUSED = [0.7 + 0.01 * seed for seed in SEEDS]  # seeds differ by more than variants
ALIKE = [of + by for of, by in zip(FUSED, DIFFERENCES, strict=True)]


def test_seeds_are_compared_in_pairs(store: Callable[..., Query]) -> None:
    covered = [0.9 + by for by in (0.002, -0.001, 0.001, 0.0, 0.003)]
    own = seed_runs("fp8", ALIKE)
    for run, coverage in zip(own, covered, strict=True):
        run["training"][-1]["heldout_coverage"] = coverage
        last = run["training"][-1]
        last["heldout_log_likelihood_8_bits"] = last["heldout_log_likelihood"] + 0.004
    row = one(store(*seed_runs("fused", FUSED), *own), "from training_seeds")
    assert (row["variant"], row["baseline_variant"], row["products"]) == ("fp8", "fused", "")
    sizes = [row[name] for name in RECIPE]
    assert sizes == list(RECIPE.values())
    assert (row["n_seeds"], row["n_pairs"], row["n_diverged"]) == (5, 5, 0)
    half = 2.1318 * np.std(DIFFERENCES, ddof=1) / np.sqrt(5)  # Student's t, 4 degrees, 95 %
    mean = np.mean(DIFFERENCES)
    assert row["mean_difference"] == pytest.approx(mean)
    assert row["difference_low"] == pytest.approx(mean - half, rel=1e-3)
    assert row["difference_high"] == pytest.approx(mean + half, rel=1e-3)
    assert row["difference_8_bits"] == pytest.approx(mean + 0.004)
    assert row["difference_8_bits_low"] == pytest.approx(mean + 0.004 - half, rel=1e-3)
    assert row["difference_8_bits_high"] == pytest.approx(mean + 0.004 + half, rel=1e-3)
    del own[0]["training"][-1]["heldout_log_likelihood_8_bits"]
    lacking = one(store(*seed_runs("fused", FUSED), *own), "from training_seeds")
    assert lacking["difference_8_bits"] is None and lacking["difference_8_bits_low"] is None
    half = 2.1318 * np.std(covered, ddof=1) / np.sqrt(5)
    assert (row["coverage"], row["baseline_coverage"]) == pytest.approx((0.901, 0.9))
    assert row["coverage_low"] == pytest.approx(0.001 - half, rel=1e-3)
    assert row["coverage_high"] == pytest.approx(0.001 + half, rel=1e-3)
    assert (row["margin"], row["equivalent"], row["calibrated"]) == (0.01, True, True)
    assert (row["less_accurate"], row["verdict"]) == (False, "equal in training")


def test_a_variant_of_which_batch_noise_is_red_is_less_accurate_a_step(
    store: Callable[..., Query],
) -> None:
    runs = [*seed_runs("fused", FUSED), *seed_runs("fp8", ALIKE)]
    red = check("batch_noise", "gradient", 0.2, 0.1, op="mlp", implementation="e4m3", passed=False)
    row = one(store(*runs, red), "from training_seeds")
    assert row["verdict"] == "less accurate a step, equal in training"
    for other in ({"passed": True}, {"implementation": "fused"}, {"gate": "baseline"}):
        gates = {"gates": [red["gates"][0] | other]}
        assert one(store(*runs, gates), "from training_seeds")["verdict"] == "equal in training"


OTHER = RECIPE | {"steps": 101}
SHIFTED = [value - 0.012 for value in ALIKE]
NOT_KNOWN = "not known"
UNLIKE = seed_runs("fp8", SHIFTED, recipe=OTHER)


@pytest.mark.parametrize(
    "trained, said",
    [
        ([], "training not judged here"),
        (seed_runs("fp8", ALIKE[:4], range(4)), "training not judged here"),
        (seed_runs("fp8", ALIKE, device="other"), "training not judged here"),
        (seed_runs("fp8", ALIKE), "equal in training"),
        (seed_runs("fp8", SHIFTED), "not shown to be equal in training"),
        ([*seed_runs("fp8", ALIKE), *UNLIKE], "equal in training in 1 of 2 comparisons"),
        ([*seed_runs("fp8", ALIKE), *UNLIKE[:4]], "equal in training in 1 of 2 comparisons"),
        (seed_runs("fp8", [*ALIKE[:4], None]), "diverged"),
    ],
    ids=[
        "none",
        "few",
        "elsewhere",
        "equal",
        "shifted",
        "of two",
        "of two, one unpaired",
        "diverged",
    ],
)
def test_a_step_in_8_bits_says_how_it_trains(
    store: Callable[..., Query], trained: list[Tables], said: str
) -> None:
    baselines = [
        run for recipe in (RECIPE, OTHER) for run in seed_runs("fused", FUSED, recipe=recipe)
    ]
    timed = [*runs("fp8", [40.0], role="own", precision="e4m3"), *runs("fused", [50.0])]
    query = store(*timed, *baselines, *trained)
    for view in ("step_summary", "speedup", "memory", "matrix"):
        found = {row["variant"]: row["products_in"] for row in query(f"from {view}")}
        assert found == {"fused": "bfloat16", "fp8": f"8 bits: less accurate a step, {said}"}


@pytest.mark.parametrize(
    "own, verdict",
    [
        (seed_runs("fp8", SHIFTED), "not shown to be equal in training"),
        (seed_runs("fp8", [0.69, 0.74, 0.70, 0.75, 0.72]), "not shown to be equal in training"),
        (seed_runs("fp8", [*ALIKE[:4], None]), "diverged"),
        (seed_runs("fp8", ALIKE, heldout_coverage=0.88), "not shown to be as well calibrated"),
        (seed_runs("fp8", ALIKE, loss=math.inf), "diverged"),
        (seed_runs("fp8", ALIKE[:1], range(1)), NOT_KNOWN),
        (seed_runs("fp8", ALIKE[:4], range(4)), NOT_KNOWN),
        (seed_runs("fp8", ALIKE, range(5, 10)), NOT_KNOWN),
        (seed_runs("fp8", ALIKE, range(1, 6)), NOT_KNOWN),
    ],
    ids=["shifted", "spread", "nan", "coverage", "inf", "one", "four", "unpaired", "partly"],
)
def test_no_falsehood_is_equal_in_training(
    store: Callable[..., Query], own: list[Tables], verdict: str
) -> None:
    row = one(store(*seed_runs("fused", FUSED), *own), "from training_seeds")
    assert row["verdict"] == verdict
    equivalent = {"not known": None, "not shown to be as well calibrated": True}
    assert row["equivalent"] is equivalent.get(verdict, False)


def test_a_baseline_that_diverged_is_no_excuse(store: Callable[..., Query]) -> None:
    query = store(*seed_runs("fused", [*FUSED[:4], None]), *seed_runs("fp8", ALIKE))
    assert one(query, "from training_seeds")["verdict"] == "diverged"


def test_other_recipes_make_no_pair_and_a_repeated_seed_counts_once(
    store: Callable[..., Query],
) -> None:
    query = store(*seed_runs("fused", FUSED), *seed_runs("fp8", ALIKE, recipe=OTHER))
    row = one(query, "from training_seeds")
    assert (row["n_seeds"], row["n_pairs"], row["verdict"]) == (5, 0, NOT_KNOWN)
    repeated = [
        run
        for again in range(5)
        for run in seed_runs("fp8", ALIKE[:1], range(1), run=f"again_{again}")
    ]
    row = one(store(*seed_runs("fused", FUSED[:1], range(1)), *repeated), "from training_seeds")
    assert (row["n_seeds"], row["n_pairs"], row["verdict"]) == (1, 1, NOT_KNOWN)


def test_runs_that_end_in_16_bits_are_judged_by_themselves(store: Callable[..., Query]) -> None:
    ended = seed_runs("fp8", ALIKE, last_in_16_bits=10)
    for table in ended:
        for row in table["training"]:
            row["run"] = f"ended_{row['seed']}"
    plain = seed_runs("fp8", SHIFTED, last_in_16_bits=0)
    timed = runs("fp8", [40.0], role="own", precision="e4m3")
    query = store(*seed_runs("fused", FUSED), *plain, *ended, *timed)
    rows = {row["last_in_16_bits"]: row for row in query("from training_seeds")}
    assert {last: row["equivalent"] for last, row in rows.items()} == {0: False, 10: True}
    assert all((row["n_seeds"], row["n_pairs"]) == (5, 5) for row in rows.values())
    (step,) = query("from step_summary")
    assert step["products_in"].endswith("equal in training in 1 of 2 comparisons")


def test_a_control_is_judged_by_itself(store: Callable[..., Query]) -> None:
    """Its variant is the baseline's: emulated products are what it differs in."""
    control = seed_runs("fused", SHIFTED, products="e5m2", baseline="fused")
    for run in control:
        for row in run["training"]:
            row["run"] = f"e5m2_{row['seed']}"
    query = store(*seed_runs("fused", FUSED), *seed_runs("fp8", ALIKE), *control)
    rows = {row["products"]: row for row in query("from training_seeds")}
    assert rows.keys() == {"", "e5m2"}
    assert rows[""]["equivalent"] is True and rows["e5m2"]["equivalent"] is False
    assert (rows["e5m2"]["variant"], rows["e5m2"]["n_seeds"]) == ("fused", 5)


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
