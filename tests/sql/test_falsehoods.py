"""No view believes a falsehood: each test builds rows that suggest one."""

import json
import math
from datetime import timedelta

import pytest

from tests.sql.conftest import (
    CODE,
    NOW,
    Query,
    Row,
    Store,
    Tables,
    check,
    gate,
    one,
    operator,
    run,
    step,
)

JUDGED = "select variant, run_id, gated, valid, why_not from current_steps order by run"


def code(kernel: str = "1", module: str = "1") -> dict[str, dict[str, str]]:
    return {"kernel": {"_kernel": kernel}, "module": {"tnp.model": module}}


def test_a_row_with_its_gate_green_counts(store: Store) -> None:
    query = store(gate("g"), run("r", step("fused", [1.0]), minutes=1))
    row = one(query, "from current_steps")
    assert (row["gated"], row["valid"], row["why_not"]) == (True, True, None)
    line = one(query, "from gate_evidence")
    assert (line["deciding_run"], line["passed"], line["reason"]) == ("g", True, None)


# 1
def test_a_gate_that_was_green_on_other_code_proves_nothing(store: Store) -> None:
    red = gate("red at A", passed=False, code=code(module="A"))
    timed = run("timed at A", step("fused", [1.0]), minutes=1, code=code(module="A"))
    green = gate("green at B", minutes=2, code=code(module="B"))
    row = one(store(red, timed, green), JUDGED)
    assert (row["gated"], row["valid"]) == (False, False)
    assert row["why_not"] == "gate proof is red: far: error 3, bound 1"
    row = one(store(timed, green), JUDGED)
    assert (row["gated"], row["valid"]) == (None, None)
    assert row["why_not"].startswith("gate proof has not run on this code")
    again = gate("green at A", minutes=3, code=code(module="A"))
    assert one(store(red, timed, green, again), JUDGED)["valid"] is True


def test_a_gate_of_an_operator_that_no_variant_chooses_decides(store: Store) -> None:
    """A block runs the operators that a variant names."""
    block = "op--transformer_block--fused"
    about = {"op": "transformer_block", "implementation": "fused"}
    uses = json.dumps({"attention": "fused"})
    timed = run("timed", step("fused", [1.0], operators=uses), gates=block)
    for passed in (True, False):
        proof = run("g", check(block, "far", 0.5, 1.0, passed=passed, **about), minutes=1)
        assert one(store(timed, proof), JUDGED)["gated"] is passed
    other = check("op--attention--single", "far", 0.5, 1.0, passed=True, implementation="single")
    timed = run("timed", step("fused", [1.0], operators=uses), gates="op--attention--single")
    assert one(store(timed, run("g", other, minutes=1)), JUDGED)["gated"] is None


def test_a_gate_proves_nothing_on_another_device_or_with_other_versions(store: Store) -> None:
    timed = run("timed", step("fused", [1.0]))
    assert one(store(timed, gate("g", torch="2.11.0")), JUDGED)["gated"] is None
    other_device = run("g", check("proof", "far", 0.5, 1.0, passed=True, device="other"))
    assert one(store(timed, other_device), JUDGED)["gated"] is None
    assert one(store(timed, gate("g", gpu="GPU-2")), JUDGED)["gated"] is True


# 2
def test_one_green_gate_of_four_proves_nothing(store: Store) -> None:
    awaited = {"gates": "proof|baseline|mlp|centred"}
    query = store(gate("g"), run("r", step("fused", [1.0]), **awaited))
    row = one(query, JUDGED)
    assert (row["gated"], row["valid"]) == (None, None)
    assert row["why_not"].startswith("gate baseline has not run")
    passed = {row["gate"]: row["passed"] for row in query("from gate_evidence")}
    assert passed == {"proof": True, "baseline": None, "mlp": None, "centred": None}


def test_a_slow_build_makes_no_result_wrong(store: Store) -> None:
    """Early rows waited for gate `kernels` too, which is red where a build spills."""
    spills = run("k", check("kernels", "a build", 8.0, 0.0, passed=False))
    query = store(gate("g"), spills, run("r", step("fused", [1.0]), gates="proof|kernels"))
    assert one(query, JUDGED)["gated"] is True
    alone = store(spills, run("r", step("fused", [1.0]), gates="kernels"))
    assert one(alone, JUDGED)["gated"] is None


# 3
def test_a_gate_that_could_check_nothing_proves_nothing(store: Store) -> None:
    query = store(gate("g", passed=None), run("r", step("fused", [1.0])))
    row = one(query, JUDGED)
    assert (row["gated"], row["why_not"]) == (None, "gate proof could run no check of this")
    assert one(query, "from gate_status")["passed"] is None


@pytest.mark.parametrize("status", ["killed", "timeout"])
def test_a_gate_that_did_not_finish_decides_nothing(store: Store, status: str) -> None:
    timed = run("r", step("fused", [1.0]))
    unfinished = run("late", check("proof", "it", None, None, status=status), minutes=9)
    assert one(store(timed, unfinished), JUDGED)["gated"] is None
    assert one(store(timed, gate("g"), unfinished), JUDGED)["gated"] is True
    red = check("proof", "far", 3.0, 1.0, passed=False)
    assert (
        one(store(timed, gate("g"), run("red", red, unfinished, minutes=9)), JUDGED)["valid"]
        is False
    )
    raised = run("late", check("proof", "it", None, None, status="error", reason="E"), minutes=9)
    row = one(store(timed, gate("g"), raised), JUDGED)
    assert (row["gated"], row["why_not"]) == (False, "gate proof did not finish: E")


# 4
@pytest.mark.parametrize("passed", [False, None])
def test_a_row_with_a_red_gate_does_not_count(store: Store, passed: bool | None) -> None:
    job = run("op", *(operator(name, time_ms_p50=1.0) for name in ("sdpa_flash", "fused")))
    query = store(gate("g", passed), run("step", step("fused", [1.0])), job)
    expected = {"fused": passed, "sdpa_flash": True}  # which waits for its check alone
    rows = query("select implementation, valid from current_ops")
    assert {row["implementation"]: row["valid"] for row in rows} == expected
    assert one(query, JUDGED)["valid"] is passed


def test_an_operator_whose_output_was_not_checked_after_timing_is_not_proven(store: Store) -> None:
    unchecked = {"time_ms_p50": 1.0, "max_abs_error": None}
    job = run("op", *(operator(name, **unchecked) for name in ("sdpa_flash", "fused")))
    for row in store(gate("g"), job)("from current_ops"):
        assert row["gated"] is None
        assert row["why_not"] == "the output was not checked after timing"


# 5
def test_a_kernel_that_no_gate_launched_is_not_proven(store: Store) -> None:
    other_hash = run("r", step("fused", [1.0]), code=code(kernel="2"))
    row = one(store(gate("g"), other_hash), JUDGED)
    assert (row["gated"], row["valid"]) == (None, None)
    assert row["why_not"] == "no gate has run kernel _kernel as it was timed"
    others = {"kernel": {"_other_kernel": "1"}, "module": CODE["module"]}
    row = one(store(gate("g"), run("r", step("fused", [1.0]), code=others)), JUDGED)
    assert row["why_not"] == "no gate has run kernel _other_kernel as it was timed"


def test_a_module_of_the_model_that_no_gate_names_is_not_proven(store: Store) -> None:
    timed = {"module": CODE["module"] | {"tnp.bench.steps": "1"}}
    assert one(store(gate("g"), run("r", step("x", [1.0]), code=timed)), JUDGED)["gated"]
    timed = {"module": CODE["module"] | {"tnp.ops.mlp": "1"}}
    row = one(store(gate("g"), run("r", step("x", [1.0]), code=timed)), JUDGED)
    assert row["why_not"] == "no gate has run module tnp.ops.mlp as it was timed"


@pytest.mark.parametrize(
    ("name", "gated"),
    [("tnp.dispatch.tuned_tables:_parsed", True), ("tnp.dispatch.plans:build", None)],
)
def test_what_reads_tables_may_differ_from_what_the_gate_ran(
    store: Store, name: str, gated: bool | None
) -> None:
    """It computes nothing, and the kernels that it chose are compared in its place."""

    def with_hash(found: str) -> dict[str, dict[str, str]]:
        return {
            "kernel": CODE["kernel"],
            "definition": {"tnp.model.network:TransformerNP": "1", name: found},
        }

    timed = run("r", step("fused", [1.0]), code=with_hash("2"))
    assert one(store(gate("g", code=with_hash("1")), timed), JUDGED)["gated"] is gated


def test_what_auto_chose_is_proven_as_what_it_chose(store: Store) -> None:
    def automatic(**chosen: str) -> Tables:
        """A run of `auto`, from what it chose in each pass."""
        jobs = []
        for of_pass, name in chosen.items():
            launch = json.dumps({"implementation": name, "source": "tuned"})
            columns = {"time_ms_p50": 1.0, "launch_config": launch, "pass": of_pass}
            jobs.append(operator("auto", "mlp", **columns))
        modules = {"module": CODE["module"] | {"tnp.ops.auto": "1"}}
        return run("r", *jobs, gates="single|fused", code=modules)

    def of(name: str, passed: bool) -> Tables:
        about = {"op": "mlp", "implementation": name, "passed": passed}
        return run(name, check(name, "far", 3.0, 1.0, **about))

    gates = [of("single", True), of("fused", False)]
    proven = {
        name: one(store(*gates, automatic(forward=name)), "from current_ops")["gated"]
        for name in ("single", "fused", "torch")
    }
    assert proven == {"single": True, "fused": False, "torch": True}
    missing = one(store(gates[0], automatic(forward="single")), "from current_ops")
    assert missing["gated"] is None and missing["why_not"].startswith("gate fused has not run")
    for passes in (("forward", "backward"), ("backward", "forward")):
        chosen = dict(zip(passes, ("single", "fused"), strict=True))
        rows = store(*gates, automatic(**chosen))("from current_ops")
        assert {row["pass"]: row["gated"] for row in rows} == {
            of_pass: name == "single" for of_pass, name in chosen.items()
        }


# 6
def test_a_copied_file_counts_once(store: Store) -> None:
    parts = [
        gate("g"),
        run("s", step("fused", [1.0])),
        run("o", operator("fused", time_ms_p50=1.0)),
    ]
    views = ("sessions", "gate_evidence", "gate_status")

    def rows(query: Query) -> dict[str, list[Row]]:
        found = {view: query(f"from {view} order by all") for view in views}
        for view in ("measurements", "current_gates", "current_steps", "current_ops"):
            found[view] = query(f"select * exclude (origin) from {view} order by all")
        return found

    once = rows(store(*parts))
    assert all(once.values())
    assert rows(store(*parts, recorded=parts, copies=2)) == once


# 7
def test_every_process_is_a_run_whatever_number_its_replicate_has(store: Store) -> None:
    timed = [
        run(f"r{i}", step("fused", [1.0], replicate=replicate), minutes=i)
        for i, replicate in enumerate((1, 2, 1, 1))
    ]
    rows = store(gate("g"), *timed)("from current_steps where valid order by run")
    assert [row["run"] for row in rows] == ["r0", "r1", "r2", "r3"]
    assert len({row["code_version"] for row in rows}) == 1
    older = [step("fused", [1.0], recorded_at=NOW + timedelta(seconds=i)) for i in range(3)]
    assert len(store(*older)("from current_steps")) == 3


# 8
def test_versions_are_generations_and_gpus_are_sessions(store: Store) -> None:
    query = store(
        run("old", step("fused", [1.0]), torch="2.11.0"),
        run("one", step("fused", [2.0]), minutes=1),
        run("two", step("fused", [3.0]), minutes=2, gpu="GPU-2"),
    )
    rows = query("from current_steps order by run")
    assert [(row["run"], row["torch"], row["gpu"]) for row in rows] == [
        ("one", "2.13.0", "GPU-1"),
        ("two", "2.13.0", "GPU-2"),
    ]
    assert rows[0]["session"] != rows[1]["session"]


@pytest.mark.parametrize(("gap", "n_sessions"), [(29, 1), (31, 2)])
def test_a_session_ends_with_a_gap_of_half_an_hour(
    store: Store, gap: float, n_sessions: int
) -> None:
    minutes = (0, gap, 2 * gap - 25)  # the last is near the second in either case
    query = store(*(run(f"r{i}", step("x", [1.0]), minutes=m) for i, m in enumerate(minutes)))
    assert len(query("select distinct session from sessions")) == n_sessions


# 9
def test_a_role_is_a_column_and_no_name(store: Store) -> None:
    query = store(
        run("r1", step("sdpa_our_mlp", [1.0]), role="own"),
        run("r2", step("torch_best", [1.0]), role="peer"),
    )
    rows = query("select variant, role from current_steps")
    assert {row["variant"]: row["role"] for row in rows} == {
        "sdpa_our_mlp": "own",
        "torch_best": "peer",
    }


def test_rows_from_before_roles_have_one_by_what_is_in_them(store: Store) -> None:
    def before(variant: str, **operators: str) -> Tables:
        return step(variant, [1.0], operators=json.dumps(operators) if operators else None)

    query = store(
        before("sdpa_flash"),
        before("sdpa_cudnn_padded"),
        before("separate_compiled"),
        before("only_mlp", attention="sdpa_cudnn", mlp="fused"),
        before("only_skip_unread", attention="sdpa_cudnn", mlp="torch"),
        *(operator(name, time_ms_p50=1.0) for name in ("sdpa_flash", "fa4", "single", "auto")),
    )
    steps = query("select variant as name, role from current_steps")
    operators = query("select implementation as name, role from current_ops")
    assert {row["name"]: row["role"] for row in [*steps, *operators]} == {
        "sdpa_flash": "baseline",
        "sdpa_cudnn_padded": "peer",
        "separate_compiled": "own",
        "only_mlp": "own",
        "only_skip_unread": "peer",
        "fa4": "peer",
        "single": "own",
        "auto": "own",
    }


# 10
def test_an_old_failure_hides_no_newer_good_row(store: Store) -> None:
    unknown = {"kernels_hash": None}  # of what it would have launched
    query = store(
        gate("g"),
        run("r0", step("fused", "timeout", replicate=3), **unknown),
        *(run(f"r{i}", step("fused", [1.0], replicate=i), minutes=i) for i in (1, 2)),
    )
    rows = query(JUDGED)
    assert [(row["run_id"], row["valid"]) for row in rows] == [
        ("r0", False),
        ("r1", True),
        ("r2", True),
    ]
    assert rows[0]["why_not"] == "timeout: because timeout"


def test_a_failure_of_other_code_takes_the_place_of_good_rows(store: Store) -> None:
    good = run("good", step("fused", [1.0]))
    other = {"kernels_hash": None, "spec_hash": "other"}
    for status, current in (("oom", "bad"), ("gate_failed", "bad"), ("timeout", "good")):
        bad = run("bad", step("fused", status), minutes=1, **other)
        assert one(store(good, bad), "from current_steps")["run"] == current, status
    killed = run("bad", step("fused", "killed"))
    assert one(store(killed), "from current_steps")["status"] == "killed"


# 11
def test_a_crash_that_a_process_of_its_own_recorded_is_shown(store: Store) -> None:
    job = run("job", *(operator(name, time_ms_p50=1.0) for name in ("sdpa_flash", "separate")))
    crash = run("crash", operator("fused", status="error"), minutes=-1, kernels_hash=None)
    rows = store(gate("g"), job, crash)("from current_ops order by implementation")
    assert [(row["implementation"], row["status"], row["valid"]) for row in rows] == [
        ("fused", "error", False),
        ("sdpa_flash", "ok", True),
        ("separate", "ok", True),
    ]


# 12
@pytest.mark.parametrize("newer_is_recorded", [True, False])
def test_the_newer_row_counts_wherever_it_was_recorded(
    store: Store, newer_is_recorded: bool
) -> None:
    old = [run("old", step("fused", [1.0]), operator("fused", time_ms_p50=1.0))]
    new = [run("new", *old, minutes=60, kernels_hash="new")]
    runs, recorded = (old, new) if newer_is_recorded else (new, old)
    query = store(*runs, recorded=recorded)
    for view in ("current_steps", "current_ops"):
        assert one(query, f"from {view}")["run"] == "new"


# 13
def test_a_thermally_throttled_row_does_not_count(store: Store) -> None:
    row = one(store(gate("g"), run("r", step("sdpa_flash", [2.0]), throttled=True)), JUDGED)
    assert (row["gated"], row["valid"]) == (True, False)
    assert row["why_not"] == "heat or hardware slowed the device while this was timed"


def test_a_row_that_did_not_settle_does_not_count(store: Store) -> None:
    for settled, why in (
        (False, "the samples were not precise enough"),
        (None, "whether the samples we"),
    ):
        row = one(store(gate("g"), run("r", step("fused", [2.0]), settled=settled)), JUDGED)
        assert row["valid"] is settled and row["why_not"].startswith(why)


def test_a_round_is_all_that_its_calls_took(store: Store) -> None:
    """A sample is the mean of its launches: of a hundred it is a small part of a long call."""
    long = step("fused", [1.0, 1.0, 1.0]), {"n_launches": 100}
    short = step("sdpa_flash", [10.0, 10.0, 20.0]), {"n_launches": 1}
    parts = []
    for part, columns in (long, short):
        at = ({"t_s": float(i)} for i in range(3))
        parts.append(part | {"samples": [row | columns | next(at) for row in part["samples"]]})
    # 110 to 120 ms a round are 9 % apart, 11 to 21 of plain means 65.
    rows = store(gate("g"), run("r", *parts))("from stg_samples")
    assert [row["precise_enough"] for row in rows] == [False]
    parts[1]["samples"][2]["time_ms"] = 10.9  # 0.8 %, and 8 of plain means
    assert one(store(gate("g"), run("r", *parts)), "from stg_samples")["precise_enough"]


# 14
@pytest.mark.parametrize("times", [[math.nan], [math.inf], [1.0, 1.0, math.inf]])
def test_a_time_that_is_no_finite_number_is_an_error(store: Store, times: list[float]) -> None:
    mean = sum(times) / len(times)
    query = store(
        gate("g"),
        run("s", step("fused", times, step_ms_mean=mean)),
        run("o", operator("fused", time_ms_p50=sorted(times)[0], time_ms_mean=mean)),
    )
    for view in ("current_steps", "current_ops"):
        row = one(query, f"from {view}")
        assert (row["status"], row["valid"]) == ("error", False)
        assert row["why_not"] == "error: its time is not a finite number"


def test_what_was_recorded_before_evidence_is_neither_proven_nor_disproven(store: Store) -> None:
    red = check("proof", "far", 3.0, 1.0, passed=False)
    before = step("fused", [1.0], gates="proof"), operator("fused", time_ms_p50=1.0)
    query = store(red, *before, gate("g", passed=False))
    for view in ("current_steps", "current_ops"):
        row = one(query, f"from {view}")
        assert (row["gated"], row["valid"]) == (None, None)
        assert row["why_not"] == "recorded before evidence was kept"
    row = one(store(red, run("r", step("fused", [1.0]))), JUDGED)
    assert row["why_not"].startswith("gate proof has not run on this code")
