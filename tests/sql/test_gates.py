"""Views of gates, and what they say of the steps that wait for them."""

import json
from collections.abc import Callable
from datetime import timedelta
from itertools import product

import pytest

from tests.sql.conftest import NOW, Query, Tables, check, step
from tnp.gates import GATES, gates_for
from tnp.ops import registry


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


def test_a_red_check_of_one_implementation_marks_its_variants(store: Callable[..., Query]) -> None:
    query = store(
        check("baseline", "far", 3.0, 1.0, passed=False, implementation="separate"),
        check("baseline", "near", 0.1, 1.0, passed=True, implementation="sdpa_flash"),
        *(step(name, [1.0]) for name in ("sdpa_flash", "separate", "separate_compiled", "triton")),
    )
    rows = query("select variant, gate_passed from speedup order by variant")
    assert [row["gate_passed"] for row in rows] == [True, False, False, None]


def test_a_red_gate_marks_the_steps_that_wait_for_it(store: Callable[..., Query]) -> None:
    variants = [{"attention": name} for name in ("sdpa_flash", "separate", "fused")]
    variants += [{"attention": "sdpa_cudnn", "mlp": "fused", "rms_norm": "torch"}]
    variants += [dict.fromkeys(registry.CANDIDATES, "auto")]
    parts, expected = [], {}
    for gate in GATES:  # red alone, on a device of its name
        parts.append(check(gate, "far", 3.0, 1.0, passed=False, device=gate))
        for number, (operators, *switches) in enumerate(
            product(variants, (False, True), (False, True), (False, True))
        ):
            gates = gates_for(operators, *switches)
            uses = {"operators": json.dumps(operators), "gates": "|".join(gates)}
            parts.append(step(f"v{number}", [1.0], device=gate, **uses))
            expected[gate, f"v{number}"] = False if gate in gates else None
    rows = store(*parts)("select device, variant, gate_passed from speedup")
    assert {(row["device"], row["variant"]): row["gate_passed"] for row in rows} == expected


def test_a_red_check_marks_steps_that_use_its_implementation_of_the_gates_operator(
    store: Callable[..., Query],
) -> None:
    def variant(name: str, **operators: str) -> Tables:
        uses = {"gates": "|".join(gates_for(operators)), "operators": json.dumps(operators)}
        return step(name, [1.0], **uses)

    heads = {"op": "mixture_heads"}
    query = store(
        check("mlp", "far", 3.0, 1.0, passed=False, implementation="fused", op="mlp"),
        check("mlp", "near", 0.1, 1.0, passed=True, implementation="single", op="mlp"),
        check("baseline", "far", 3.0, 1.0, passed=False, implementation="separate"),  # no `op` yet
        check("baseline", "near", 0.1, 1.0, passed=True, op="attention"),
        variant("fused_mlp", attention="sdpa_flash", mlp="fused"),
        variant("single_mlp", attention="sdpa_flash", mlp="single"),
        variant("fused", attention="fused", mlp="torch"),
        variant("separate", attention="separate"),
        variant("auto_mlp", attention="sdpa_flash", mlp="auto"),
        check("mixture_heads", "far", 3.0, 1.0, passed=False, implementation="loop", **heads),
        check("mixture_heads", "near", 0.1, 1.0, passed=True, implementation="bmm", **heads),
        variant("auto_heads", attention="sdpa_flash", mixture_heads="auto"),
    )
    rows = query("select variant, gate_passed from speedup")
    assert {row["variant"]: row["gate_passed"] for row in rows} == {
        "fused_mlp": False,
        "single_mlp": True,
        "fused": True,
        "separate": False,
        "auto_mlp": False,  # it may choose `fused`
        "auto_heads": True,  # it never chooses `loop`
    }


def test_rows_without_gates_say_by_their_variants_name_what_they_wait_for(
    store: Callable[..., Query],
) -> None:
    parts, expected = [], {}
    gates = ("attention_forward", "attention_backward", "attention_fused", "checkpointing")
    for gate in (*gates, "baseline", "cuda_graphs", "kernels", "mlp"):
        parts.append(check(gate, "far", 3.0, 1.0, passed=False, device=gate))
        for attention, *switches in product(
            ("sdpa_flash", "separate", "fused"), (False, True), (False, True)
        ):
            checkpoint, cuda_graph = switches
            parts.append(
                step(attention, [1.0], checkpoint=checkpoint, cuda_graph=cuda_graph, device=gate)
            )
            waits = gate in gates_for({"attention": attention}, checkpoint, cuda_graph)
            expected[gate, attention, checkpoint, cuda_graph] = False if waits else None
    rows = store(*parts)("select device, variant, checkpoint, cuda_graph, gate_passed from speedup")
    assert {tuple(row.values())[:4]: row["gate_passed"] for row in rows} == expected


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
