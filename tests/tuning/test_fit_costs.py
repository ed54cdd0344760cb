"""Tests what `python -m tnp.tuning.fit_costs` times, fits, and says without a GPU."""

import json
from random import Random

import pytest

from tnp.bench import child, process, provenance
from tnp.bench.costs import measure_costs
from tnp.dispatch import devices, tuned_tables
from tnp.dispatch.selection import kernels_of
from tnp.dispatch.spec import Call
from tnp.ops.attention import FORWARD, FUSED, OPERATOR, SEPARATE, definition
from tnp.tuning import fit_costs

H200 = devices.named("nvidia-h200")
SMALL = OPERATOR.problem("float32", batch=1, n_heads=2, n_q=20, n_k=40, head_dim=16)


def rows(us: tuple[float, ...], n: int = 40, noise: float = 0.0) -> list[dict]:
    """Makes rows of the first configuration of kernel "hopper" from µs for each of its counts."""
    chance, found = Random(3), []
    kernel = kernels_of(FORWARD)["hopper"]
    for _ in range(n):
        problem = OPERATOR.random_problem(chance, "bfloat16")
        what = Call(problem, H200)
        config = kernel.configs(what)[0]
        counts = kernel.counts(what, config)
        time = sum(a * b for a, b in zip(counts, us, strict=True))
        found.append({
            "of": "attention.forward", "problem": problem.json, "choice": "hopper",
            "config": tuned_tables.as_json(config), "counts": counts,
            "us": time * (1 + noise * chance.uniform(-1, 1)),
        })  # fmt: skip
    return found


def test_what_each_count_takes_is_found_again():
    ((entry, line),) = fit_costs.fitted(OPERATOR, rows((5.0, 0.6, 2.0, 15.0)))
    assert entry["us"] == pytest.approx([5.0, 0.6, 2.0, 15.0], abs=1e-3)
    assert line[4] == "0%"
    assert entry["problem"] == {"op": "attention", "itemsize": 2, "sizes": {"head_dim": 64}}


def test_a_short_launch_counts_as_much_as_a_long_one():
    """10 % of a launch of 1 ms is twenty short launches: absolute errors would drown those."""
    ((entry, line),) = fit_costs.fitted(OPERATOR, rows((5.0, 0.6, 2.0, 15.0), 200, noise=0.1))
    assert entry["us"][0] == pytest.approx(5.0, rel=0.05)
    assert line[4] in ("5%", "6%")


def test_a_time_that_is_far_from_the_fastest_counts_for_little():
    """A launch of 10 µs where it is the fastest, and of 20 µs where the fastest takes 10: errors
    of 1/10 and 1/20 a µs, the second a quarter of itself."""
    chance, timed = Random(3), []
    for at in range(40):
        us = 20.0 if at % 2 else 10.0
        problem = OPERATOR.random_problem(chance, "bfloat16").json
        of = {"of": "attention.forward", "problem": problem, "choice": "hopper", "counts": (1.0,)}
        timed += [of | {"config": {"other": 1}, "us": us}, of | {"config": {}, "us": 10.0}]
    (other, _), (fastest, _) = fit_costs.fitted(OPERATOR, timed)
    near, far = 1 / 10, 1 / 20 / 4
    assert fastest["us"] == [10.0]
    assert other["us"] == pytest.approx([(near + far / 4) / (near**2 + far**2)], abs=1e-3)


def test_too_few_sizes_and_what_was_never_counted_say_nothing():
    assert fit_costs.fitted(OPERATOR, rows((5.0, 0.6, 2.0, 15.0), 15)) == []
    whole = [row for row in rows((5.0, 0.6, 2.0, 15.0), 200) if not row["counts"][3]]
    assert len(whole) > 100 and fit_costs.fitted(OPERATOR, whole) == []


def test_counts_that_go_together_get_no_negative_time():
    """Three of 40 launches have no sum of parts, and took longer than the others."""
    problem, chance = OPERATOR.random_problem(Random(3), "bfloat16"), Random(5)
    of = {"of": "attention.forward", "problem": problem.json, "choice": "hopper", "config": {}}
    timed = [
        of | {"counts": (1, load, float(i > 2)), "us": 8.0 + load + 4.0 * (i <= 2)}
        for i, load in enumerate(chance.uniform(1, 9) for _ in range(40))
    ]
    ((entry, _),) = fit_costs.fitted(OPERATOR, timed)
    assert entry["us"][0] > 5 and min(entry["us"]) >= 0


def test_every_kernel_that_says_its_counts_is_timed(monkeypatch):
    """Interpreted: that times and counts belong together, not what they are."""
    monkeypatch.setattr(definition, "random_problem", lambda operator, chance, dtype: SMALL)
    asked = {"op": "attention", "dtype": "float32", "n_sizes": 1, "seed": 0}
    found = measure_costs(asked | {"device": "cpu", "device_slug": "cpu"})
    what = Call(SMALL, devices.CPU)
    expected = [
        (operation.name, name, tuned_tables.as_json(config), kernel.counts(what, config))
        for operation in (FORWARD, SEPARATE, FUSED)
        for name, kernel in kernels_of(operation).items()
        if kernel.refuses(what) is None
        for config in kernel.configs(what)
    ]
    names = "of", "choice", "config", "counts"
    assert [tuple(row[name] for name in names) for row in found] == expected
    assert all(row["us"] > 0 for row in found)


@pytest.fixture
def reported(monkeypatch):
    """Stands for a child on a GPU: holds its report, and notes what it was asked for."""
    report, asked = {"failure": ("error", "its process ended without a result")}, []

    def run_child(command, parameters, timeout_s):
        asked.append((command, json.loads(json.dumps(parameters))))
        return report

    monkeypatch.setattr(process, "run_child", run_child)
    monkeypatch.setattr(child, "require_gpu", lambda: H200)
    return report, asked


def test_costs_are_entered_in_the_users_table(users_tables, reported, capsys):
    report, asked = reported
    report["timed"] = rows((5.0, 0.6, 2.0, 15.0))
    assert fit_costs.main([]) == 0
    ((command, parameters),) = asked
    assert command == ["tnp.bench.child", "costs"]
    assert (parameters["op"], parameters["device_slug"]) == ("attention", "nvidia-h200")
    (entry,) = tuned_tables.table(users_tables / "nvidia-h200.json")
    assert entry["us"] == pytest.approx([5.0, 0.6, 2.0, 15.0], abs=1e-3)
    assert "5  0.6  2  15" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("failure", "n_timed", "said"),
    [
        (("oom", "out of memory"), 0, "out of memory"),
        (None, 3, "too few sizes were timed of each kernel"),
    ],
)
def test_where_too_little_was_timed_nothing_is_written(
    users_tables, reported, capsys, failure, n_timed, said
):
    reported[0]["failure"] = failure
    if n_timed:
        reported[0]["timed"] = rows((5.0, 0.6, 2.0, 15.0), n_timed)
    assert fit_costs.main([]) == 1
    said = f"nothing could be fitted of attention: {said}\n"
    assert capsys.readouterr().err.endswith(said)
    assert not users_tables.exists()


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(provenance, "device_slug", lambda: "cpu")
    assert fit_costs.main([]) == 2
    assert capsys.readouterr().err.startswith(
        "python -m tnp.tuning.fit_costs needs an NVIDIA GPU: none is"
    )
