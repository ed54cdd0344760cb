"""Tests view `ablation` against values computed by hand."""

import json
from collections.abc import Callable

import pytest

from tests.sql.conftest import Query, Tables, check, gate, runs, step
from tnp.store.schemas import TABLES


def ablated(variant: str, times: list[float] | str, **columns: object) -> Tables:
    return step(variant, times, study="ablation", **columns)


def test_ablation_compares_each_component_both_ways(store: Callable[..., Query]) -> None:
    mlp = {"operators": json.dumps({"mlp": "fused"}), "gates": "baseline|mlp"}
    query = store(
        ablated("sdpa_cudnn_padded", [10.0], gates="baseline"),
        ablated("only_mlp", [8.0], **mlp),
        ablated("without_mlp", [5.5]),
        ablated("fused", [4.0]),
        ablated("only_rms_norm", [9.0]),
        ablated("without_rms_norm", "oom"),
        check("mlp", "far", 3.0, 1.0, passed=False, implementation="fused", op="mlp"),
    )
    rows = {row["component"]: row for row in query("from ablation")}
    assert set(rows) == {"mlp", "rms_norm"}
    names = ("base_ms", "only_ms", "full_ms", "without_ms", "gain_alone_ms", "gain_last_ms")
    assert [rows["mlp"][name] for name in names] == pytest.approx([10, 8, 4, 5.5, 2, 1.5])
    names = ("speedup_alone", "speedup_last")
    assert [rows["mlp"][name] for name in names] == pytest.approx([1.25, 1.375])
    names = ("base_variant", "full_variant", "status", "verdict_alone")
    assert [rows["mlp"][name] for name in names] == ["sdpa_cudnn_padded", "fused", "ok", None]
    failed = rows["rms_norm"]
    assert (failed["gain_alone_ms"], failed["gain_last_ms"]) == (pytest.approx(1), None)
    assert (failed["status"], failed["reason"]) == ("oom", "because oom")


def test_ablation_keeps_shapes_and_devices_apart(store: Callable[..., Query]) -> None:
    def four(scale: float, **where: object) -> list[Tables]:
        times = {"sdpa_flash": 10.0, "only_mlp": 8.0, "without_mlp": 6.0, "fused": 5.0}
        prefix = "-".join(map(str, where.values()))
        return [
            ablated(name, [time * scale], config_id=f"{prefix}{name}", **where)
            for name, time in times.items()
        ]

    def with_samples(part: Tables) -> Tables:
        config_id = part["steps"][0]["config_id"]
        return part | {"samples": [row | {"config_id": config_id} for row in part["samples"]]}

    parts = [*four(1.0), *four(2.0, shape="small", n_context=7), *four(3.0, device="other")]
    query = store(*map(with_samples, parts))
    rows = {(row["device"], row["shape"]): row for row in query("from ablation")}
    gains = {where: row["gain_alone_ms"] for where, row in rows.items()}
    assert gains == pytest.approx({("gpu", "mid"): 2, ("gpu", "small"): 4, ("other", "mid"): 6})


def test_ablation_has_verdicts_from_all_runs_of_its_steps(store: Callable[..., Query]) -> None:
    def measured(variant: str, median_ms: float, **columns: object) -> list[Tables]:
        study = {"study": "ablation", "config_id": f"ablation--{variant}"} | columns
        return runs(variant, [median_ms, 1.001 * median_ms], **study)

    query = store(
        gate("gate"),
        *measured("sdpa_cudnn", 10.0),
        *measured("only_mlp", 8.0),
        *measured("fused", 5.0),
        # The same question asked by another study: its runs count too.
        *measured("fused", 5.0, study="matrix", config_id="matrix--fused", name="matrix"),
        *measured("without_mlp", 5.0),
        *measured("only_rms_norm", 9.0, throttled=True),
        *measured("without_rms_norm", 7.0),
    )
    rows = {row["component"]: row for row in query("from ablation")}
    mlp, norm = rows["mlp"], rows["rms_norm"]
    assert (mlp["verdict_alone"], mlp["verdict_last"]) == ("faster", "ambiguous")
    assert mlp["speedup_alone_low"] < 1.25 < mlp["speedup_alone_high"]
    assert mlp["gain_alone_ms"] == pytest.approx(2, rel=0.01)
    assert (norm["valid"], norm["verdict_alone"], norm["gain_alone_ms"]) == (False, None, None)
    assert norm["why_not"] == "heat or hardware slowed the device while this was timed"
    assert norm["verdict_last"] == "faster"
    (full,) = query("from step_summary where variant = 'fused'")
    assert (full["n_runs"], full["studies"], full["study"]) == (4, ["ablation", "matrix"], "matrix")


def test_a_newer_whole_leaves_the_ablation_with_what_it_was_timed_beside(
    store: Callable[..., Query],
) -> None:
    before = {"sdpa_cudnn": 10.0, "only_mlp": 8.0, "without_mlp": 6.0, "fused": 5.0}
    later = {"minutes": 300, "study": "matrix", "config_id": "matrix--fused"}
    query = store(
        gate("gate", minutes=290),
        *(ablated(name, [time]) for name, time in before.items()),
        # These steps are of other studies, and no part of an ablation.
        *(step(name, [1.0]) for name in ("fused_attention", "sdpa_cudnn_padded")),
        *runs("fused", [1.0], **later),
    )
    (row,) = query("from ablation")
    names = ("full_variant", "full_ms", "without_ms", "gain_last_ms", "speedup_last")
    assert [row[name] for name in names] == ["fused", *map(pytest.approx, (5, 6, 1, 1.2))]
    assert (row["verdict_last"], row["speedup_alone"]) == (None, pytest.approx(1.25))


def test_the_ablations_steps_are_in_no_other_comparison(store: Callable[..., Query]) -> None:
    part = ablated("only_mlp", [1.0])
    part["stages"] = [
        {name: value for name, value in part["steps"][0].items() if name in TABLES["stages"].names}
        | {"stage": "mlp", "pass": "forward", "time_ms_p50": 1.0, "source": "profiler"}
    ]
    query = store(step("sdpa_flash", [2.0]), part)
    for view in ("speedup", "memory", "matrix"):
        assert [row["variant"] for row in query(f"from {view}")] == ["sdpa_flash"]
    assert query("from stage_share") == []
    assert len(query("from step_summary")) == 2


def test_ablation_of_steps_with_evidence_is_of_one_session(store: Callable[..., Query]) -> None:
    """Medians of two GPUs say nothing of a component, and evidence does not change that."""
    for gpu, gains in (("GPU-1", True), ("GPU-2", False)):
        query = store(
            gate("g"),
            gate("g2", gpu="GPU-2"),
            *runs("sdpa_cudnn", [10.0], study="ablation"),
            *runs("only_mlp", [8.0], study="ablation", gpu=gpu),
        )
        found = [row["gain_alone_ms"] for row in query("from ablation")]
        assert (found == [pytest.approx(2)]) is gains, found
