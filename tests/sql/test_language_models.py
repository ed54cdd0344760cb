"""Tests the view of language models against values computed by hand, and the published figures."""

import json
from collections.abc import Callable

import pytest

from tests.sql.conftest import PROVENANCE, Query, Tables, gate, one, operator, run
from tests.sql.test_predictions import HASHES
from tests.sql.test_questions import asked
from tnp.bench.language_forms import FORMS

SIZES = {"model": "llama3_1b", "weights": "bf16", "batch": 8, "n_prompt": 1024, "n_new": 128}
TIMES = {"hf": 8.0, "hf_static": 4.0, "ours": 2.0}


def written(
    run_id: str, times: dict[str, float] = TIMES, minutes: float = 5, **columns: object
) -> Tables:
    """One process that timed these forms; vLLM has a row without a time."""
    rows = []
    for form in (*times, "vllm"):
        about = {"config_id": f"language_models--1b--{form}", "form": form, "replicate": 1}
        about |= {"study": "language_models", "shape": "1b", "dtype": "bfloat16"}
        outcome = {"status": "unsupported", "reason": "it is not there"}
        if form in times:
            outcome = {"status": "ok", "settled": True, "bytes": 2e9, "n_kernels": 99}
            outcome |= {f"token_ms_{name}": times[form] for name in ("p50", "mean", "p95")}
            outcome |= {"prompt_ms_p50": 30.0, "tokens_per_s": 8e3 / times[form]}
        waits = {"gates": "proof" if form == "ours" else "", "role": FORMS[form].role}
        waits["operators"] = json.dumps(FORMS[form].operators)
        rows.append(PROVENANCE | SIZES | about | outcome | HASHES | waits | columns)
    tables = run(run_id, {"generations": rows}, minutes=minutes)
    return tables | {"code": [row | {"implementation": f} for row in tables["code"] for f in times]}


def ceiling() -> Tables:
    """A device that reads 4 TB/s: the 2 GB of a step take half a millisecond."""
    read = {"time_ms_p50": 1.0, "bytes": 4e9, "role": "baseline", "gates": ""}
    return run("ceiling", operator("torch", "ceiling_read", **read))


def of_form(query: Query, form: str) -> dict:
    return one(query, f"from language_models where form = '{form}'")


def test_ours_is_compared_with_each_form_of_its_process(store: Callable[..., Query]) -> None:
    runs = [written(name, minutes=at) for at, name in ((5, "one"), (6, "two"))]
    query = store(gate("gate"), ceiling(), *runs)
    row = of_form(query, "hf_static")
    assert row["valid"] and row["n_runs"] == 2 and row["n_pairs"] == 2
    assert (row["token_ms"], row["prompt_ms_p50"], row["tokens_per_s"]) == (4.0, 30.0, 2000.0)
    assert (row["limit_tokens_per_s"], row["share_of_limit"]) == (16000.0, 0.125)
    assert row["own_speedup"] == pytest.approx(2) and row["own_verdict"] == "faster"
    assert 1.9 < row["own_speedup_low"] < 2 < row["own_speedup_high"] < 2.1
    assert of_form(query, "hf")["own_speedup"] == pytest.approx(4)
    assert of_form(query, "ours")["own_speedup"] is None
    # The other figures know nothing of language models.
    assert query("from summaries where kind not in ('step', 'operator')") == []


def test_without_a_gate_ratios_are_of_medians(store: Callable[..., Query]) -> None:
    query = store(written("one"))
    row = of_form(query, "hf")
    assert row["valid"] and row["own_speedup"] == pytest.approx(4) and row["own_verdict"] is None
    own = of_form(query, "ours")
    assert own["valid"] is None and own["why_not"].startswith("gate proof has not run")
    assert own["limit_tokens_per_s"] is None  # no ceiling was measured


def test_what_a_red_gate_stops_has_no_ratio(store: Callable[..., Query]) -> None:
    query = store(gate("gate", False), written("one"))
    assert of_form(query, "ours")["valid"] is False
    assert of_form(query, "hf")["own_speedup"] is None


def test_what_could_not_run_says_why_and_has_the_limit(store: Callable[..., Query]) -> None:
    row = of_form(store(gate("gate"), ceiling(), written("one")), "vllm")
    assert (row["status"], row["reason"]) == ("unsupported", "it is not there")
    assert row["token_ms"] is None and row["n_runs"] == 0
    assert row["limit_tokens_per_s"] == 16000.0


def test_an_h100_without_ceilings_has_the_rate_of_its_copies(store: Callable[..., Query]) -> None:
    query = store(written("one", device="nvidia-h100-80gb-hbm3"))
    assert of_form(query, "hf")["limit_tokens_per_s"] == pytest.approx(8 / (2e9 / 3e12))


def test_the_fastest_of_a_model_and_batch_is_named(store: Callable[..., Query]) -> None:
    rows = asked(store(gate("gate"), written("one")), "fastest_language_model")
    here = [row for row in rows if row["hardware"] == "gpu"]
    assert [(row["model"], row["batch"], row["fastest"]) for row in here] == [
        ("llama3_1b", 8, "ours")
    ]
    assert "H100" in {row["hardware"] for row in rows if row["source"]}


def test_published_figures_have_a_source(store: Callable[..., Query]) -> None:
    rows = store()("from literature")
    assert len(rows) > 20
    for row in rows:
        assert row["source"] and row["basis"] in ("stated", "counted") and row["tokens_per_s"] > 0


def test_a_form_that_the_host_disturbs_leaves_the_others_precise(
    store: Callable[..., Query],
) -> None:
    tables = written("one")
    for row in tables["generations"]:
        times = [1.0, 1.0, 2.0] if row["form"] == "hf" else [1.0, 1.0, 1.0]
        sample = {name: row[name] for name in (*PROVENANCE, "config_id", "replicate", "run_id")}
        sample["pass"] = f"generation {row['form']}"
        tables.setdefault("samples", []).extend(
            sample | {"sample": i, "time_ms": time, "t_s": i} for i, time in enumerate(times)
        )
    query = store(gate("gate"), tables)
    hf = of_form(query, "hf")
    assert not hf["valid"] and hf["why_not"] == "the samples were not precise enough"
    assert of_form(query, "ours")["valid"] and of_form(query, "hf_static")["own_speedup_low"]
