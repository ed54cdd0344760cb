"""Views of gates, and what they say of the steps that wait for them."""

import json
from collections.abc import Callable
from datetime import timedelta
from itertools import product

import pytest

from tests.sql.conftest import NOW, SQL, Query, Tables, check, run, step
from tnp.gates import GATES, gates_for
from tnp.model.variants import FAMILIES


def test_gate_status_counts_and_names_the_worst_check(store: Callable[..., Query]) -> None:
    query = store(
        check("attention_forward", "near", 0.9, 1.0, passed=True),
        check("attention_forward", "cosine", 0.999, 0.99, passed=True),
        check("attention_forward", "exact", 0.0, 0.0, passed=True),
        check("attention_forward", "far", 3.0, 1.0, passed=False, implementation="separate"),
        check("attention_forward", "skipped", None, None, status="unsupported"),
        check("baseline", "near", 0.5, 1.0, passed=True),
        check("kernels", "all", None, None, status="unsupported"),
        check("cuda_graphs", "cosine", 0.9, 0.99, passed=False),
        step("separate", "gate_failed", reason="gate attention_forward is red: all kernels: 3"),
        step("sdpa_flash", "oom", reason="attention_forward ran out of memory"),
    )
    rows = {row["gate"]: row for row in query("from gate_status")}
    names = ("n_checks", "n_failed", "n_skipped", "passed", "worst_check", "blocked_benchmarks")
    expected = {
        "attention_forward": [5, 1, 1, False, "far", 1],
        "baseline": [1, 0, 0, True, "near", 0],
        "kernels": [1, 0, 1, None, None, 0],
        "cuda_graphs": [1, 1, 0, False, "cosine", 0],
    }
    assert {gate: [row[name] for name in names] for gate, row in rows.items()} == expected
    assert rows["attention_forward"]["worst_value_over_bound"] == 3
    assert rows["cuda_graphs"]["worst_value_over_bound"] == pytest.approx(1.1)


def test_an_implementations_gate_has_the_phase_that_holds_today(
    store: Callable[..., Query],
) -> None:
    def recorded(op: str, name: str) -> Tables:
        of = {"op": op, "implementation": name, "phase": 2}  # as earlier runs recorded it
        return check(f"op--{op}--{name}", "near", 0.5, 1.0, passed=True, **of)

    query = store(
        recorded("attention", "fused"),
        recorded("mlp", "fused"),
        recorded("mlp", "e4m3"),
        recorded("rope", "triton"),
        check("cuda_graphs", "near", 0.5, 1.0, passed=True, phase=10),
    )
    found = {row["gate"]: row["phase"] for row in query("select gate, phase from gate_status")}
    assert found == {
        "op--attention--fused": 4,
        "op--mlp--fused": 6,
        "op--mlp--e4m3": 5,
        "op--rope--triton": None,
        "cuda_graphs": 10,
    }


def test_a_red_gate_disproves_the_steps_that_wait_for_it(store: Callable[..., Query]) -> None:
    variants = [{"attention": name} for name in ("sdpa_flash", "separate", "fused")]
    variants += [{"attention": "sdpa_cudnn", "mlp": "fused", "rms_norm": "torch"}]
    variants += [dict.fromkeys(FAMILIES, "auto")]
    parts, expected = [], {}
    # Each red alone, on a device of its name.
    for gate in [*GATES, "op--attention--separate", "op--add_rms_norm--fused"]:
        parts.append(run(gate, check(gate, "far", 3.0, 1.0, passed=False, device=gate)))
        for number, (operators, *switches) in enumerate(
            product(variants, (False, True), (False, True), (False, True))
        ):
            gates = gates_for(operators, *switches)
            uses = {"operators": json.dumps(operators), "gates": "|".join(gates)}
            parts.append(run(f"{gate}{number}", step(f"v{number}", [1.0], device=gate, **uses)))
            expected[gate, f"v{number}"] = False if gate in gates else None
    rows = store(*parts)("select device, variant, gated from current_steps")
    assert {(row["device"], row["variant"]): row["gated"] for row in rows} == expected


def test_a_check_is_about_steps_that_use_its_implementation_of_its_operator(
    store: Callable[..., Query],
) -> None:
    def variant(name: str, choices: dict | None = None, **operators: str) -> Tables:
        uses = {"gates": "baseline|mlp", "operators": json.dumps(operators)}
        chosen = [{"op": op, "implementation": name} for op, name in (choices or {}).items()]
        return run(name, step(name, [1.0], **uses, choices=json.dumps(chosen)))

    query = store(
        run(
            "mlp gate",
            check("mlp", "far", 3.0, 1.0, passed=False, implementation="fused", op="mlp"),
            check("mlp", "near", 0.1, 1.0, passed=True, implementation="single", op="mlp"),
        ),
        run(
            "baseline gate",
            check("baseline", "far", 3.0, 1.0, passed=False, implementation="separate"),  # no `op`
            check("baseline", "near", 0.1, 1.0, passed=True, implementation="fused"),
            check("baseline", "near", 0.1, 1.0, passed=True, implementation="sdpa_flash"),
        ),
        variant("fused_mlp", attention="sdpa_flash", mlp="fused"),
        variant("single_mlp", attention="sdpa_flash", mlp="single"),
        variant("fused", attention="fused", mlp="single"),
        variant("separate", attention="separate", mlp="single"),
        variant("unchecked", attention="sdpa_cudnn", mlp="single"),
        variant("auto_fused", {"mlp": "fused"}, attention="sdpa_flash", mlp="auto"),
        variant("auto_single", {"mlp": "single"}, attention="sdpa_flash", mlp="auto"),
        variant("auto_torch", {"mlp": "torch"}, attention="sdpa_flash", mlp="auto"),
    )
    rows = {row["variant"]: row for row in query("from current_steps")}
    assert {name: row["gated"] for name, row in rows.items()} == {
        "fused_mlp": False,
        "single_mlp": True,
        "fused": True,
        "separate": False,
        "unchecked": None,
        "auto_fused": False,
        "auto_single": True,
        "auto_torch": True,
    }
    assert rows["fused_mlp"]["why_not"] == "gate mlp is red: far: error 3, bound 1"
    assert rows["unchecked"]["why_not"] == "gate baseline could run no check of this"


def test_a_check_the_gate_no_longer_makes_is_gone(store: Callable[..., Query]) -> None:
    later = {"recorded_at": NOW + timedelta(hours=1)}
    query = store(
        check("baseline", "old", 3.0, 1.0, passed=False),
        check("baseline", "new", 0.5, 1.0, passed=True, **later),
        check("baseline", "new", 0.9999, 0.999, passed=True, metric="cosine", **later),
    )
    assert len(query("from current_gates")) == 2
    (gate,) = query("from gate_status")
    assert gate["passed"] is True
    assert gate["worst_value_over_bound"] == 0.5  # of the cosine 0.1: it misses 1 by 1e-4


def test_the_baselines_gate_is_not_about_attention_of_ours(store: Callable[..., Query]) -> None:
    """A step of ours waits for it too; what proves its attention is attention's own gate."""
    uses = {"gates": "baseline|attention_fused", "operators": json.dumps({"attention": "fused"})}
    parts = [
        run("baseline gate", check("baseline", "loss", 0.1, 1.0, passed=True,
                                   implementation="sdpa_flash")),
        run("ours", step("ours", [1.0], **uses)),
    ]  # fmt: skip
    own_gate = run(
        "own gate",
        check("attention_fused", "dq", 0.1, 1.0, passed=True, implementation="fused"),
    )
    assert store(*parts, own_gate)("from current_steps")[0]["gated"] is True
    assert store(*parts)("from current_steps")[0]["gated"] is None


def test_tolerances_are_a_line_for_each_implementation_with_its_worst_error(
    store: Callable[..., Query],
) -> None:
    def error(name: str, value: float, bound: float, size: int, **columns: object) -> Tables:
        of = {"op": "mlp", "implementation": name, "passed": value <= bound}
        problem = json.dumps({"op": "mlp", "dtype": "float16", "sizes": {"rows": size}})
        return check("tolerances", "y", value, bound, problem=problem, **of | columns)

    query = store(
        error("fused", 0.0008, 0.001, 1),
        error("fused", 0.0020, 0.004, 2),  # larger, and further from its bound
        error("single", 0.0005, 0.001, 1),
        error("single", 0.0060, 0.004, 2),
        error("", 3.0, 0.001, 1, passed=True),  # a control
    )
    rows = query((SQL.parent / "report" / "56_tolerances.sql").read_text())
    names = ("implementation", "cases", "worst_error", "bound", "verdict")
    assert [[row[name] for name in names] for row in rows] == [
        ["fused", 2, 0.0008, 0.001, "within"],
        ["single", 2, 0.006, 0.004, "beyond"],
    ]
