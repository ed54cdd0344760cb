"""Tests rows of predictions over one context. No test asserts a time."""

import time

import pyarrow as pa
import pytest
import torch

from tests.bench.configurations import step_parameters
from tests.bench.processes import PATIENCE_S
from tests.model.test_prediction import replayed
from tnp.bench import predictions
from tnp.bench.isolate import run_isolated
from tnp.bench.outcome import FORMS
from tnp.bench.predictions import IN_A_ROW, measure_predictions
from tnp.experiment.failures import Unsupported
from tnp.model import prediction
from tnp.model.prediction import Encoding
from tnp.store.schemas import PROVENANCE, RUN, TABLES


def parameters(**changes) -> dict:
    said = {"operators": "{}", "gates": "baseline"}
    return step_parameters(config_id="predictions--tiny--sdpa_flash") | said | changes


@pytest.fixture(scope="module")
def tables():
    return measure_predictions(parameters(), time.perf_counter())


def test_every_form_has_a_row_that_fits_its_table(tables):
    assert [row["form"] for row in tables["predictions"]] == list(FORMS)
    added = {name for name, _ in PROVENANCE + RUN}
    for row in tables["predictions"]:
        if row["form"] in ("replayed", "bare"):
            assert row["status"] == "unsupported" and "CUDA device" in row["reason"]
            continue
        assert row["status"] == "ok"
        assert set(row) | added == set(TABLES["predictions"].names)
        assert row["config_id"] == f"predictions--tiny--sdpa_flash--{row['form']}"
        assert row["time_ms_min"] <= row["time_ms_p50"] <= row["time_ms_max"]
    pa.Table.from_pylist(tables["predictions"], schema=TABLES["predictions"])


def test_samples_are_of_one_prediction_and_of_the_rows_they_are_summarized_in(tables):
    errors = {row["form"]: row.get("max_relative_error") for row in tables["predictions"]}
    assert errors["kept"] <= predictions.MOST_ERROR  # compared with those made anew
    assert errors["anew"] is errors["encode"] is None
    for row in tables["predictions"][:3]:
        samples = [s for s in tables["samples"] if s["config_id"] == row["config_id"]]
        assert len(samples) == row["n_samples"]
        assert max(s["time_ms"] for s in samples) == row["time_ms_max"]
        assert {(s["pass"], s["n_launches"]) for s in samples} == {("prediction", IN_A_ROW)}


def test_a_call_is_many_predictions_of_its_form(monkeypatch):
    """Predictions made anew encode each time; those from an encoding never do."""
    encode, n_encoded = prediction.encode, []
    monkeypatch.setattr(
        prediction,
        "encode",
        lambda *arguments, **options: n_encoded.append(1) or encode(*arguments, **options),
    )

    def counted(contenders, device, policy, launches_per_call):
        found = {}
        for form, (call,) in zip(("anew", "encode", "kept"), contenders, strict=True):
            n_encoded.clear()
            call()
            found[form] = len(n_encoded)
        assert found == {"anew": IN_A_ROW, "encode": IN_A_ROW, "kept": 0}
        raise StopIteration

    monkeypatch.setattr(predictions, "measure_interleaved", counted)
    with pytest.raises(StopIteration):
        measure_predictions(parameters(), time.perf_counter())


@torch.no_grad()
def test_the_bare_form_is_the_graph_of_the_replayed_one(monkeypatch):
    """Also of so many targets that `predict` would have them follow one another in chunks."""
    monkeypatch.setattr("tnp.model.prediction.bytes_per_target", lambda model: 1 << 29)
    variant, cpu = predictions.Variant("sdpa_flash"), torch.device("cpu")
    model, task = predictions._model_and_task(parameters(), variant, cpu, "float32")
    encoding, captures = replayed(model, model.encode(task.context))
    monkeypatch.setattr(model, "encode", lambda context, cuda_graph: encoding)
    runs = predictions._replayed(model, task, cpu)
    assert list(runs) == ["replayed", "bare"] and captures.captured == 1
    assert runs["bare"][0] is encoding.graphs.replay(task.x_target.shape)
    assert all(seconds > 0 for _, seconds in runs.values())


def test_predictions_that_differ_are_not_timed(monkeypatch):
    calls, decode = [], Encoding.decode

    def drifting(self, model, x):
        calls.append(1)
        return decode(self, model, x) * (1 + 1e-5 * len(calls))

    monkeypatch.setattr(Encoding, "decode", drifting)
    with pytest.raises(RuntimeError, match=r"that are kept are off by (9.9e-06|1e-05) of the"):
        measure_predictions(parameters(), time.perf_counter())


def test_what_the_cpu_cannot_run_is_refused():
    with pytest.raises(Unsupported):
        measure_predictions(
            parameters(variant_spec={"attention": "sdpa_cudnn"}), time.perf_counter()
        )


def test_weights_and_inputs_are_equal_in_both_dtypes():
    variant = predictions.Variant("sdpa_flash")
    cpu = torch.device("cpu")
    (one, task), (other, same) = (
        predictions._model_and_task(parameters(), variant, cpu, dtype)
        for dtype in ("float32", "bfloat16")
    )
    assert torch.equal(one.heads.up, other.heads.up) and torch.equal(task.x_target, same.x_target)


def test_a_child_measures(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = run_isolated("prediction", parameters(), PATIENCE_S)
    assert set(found) == {"predictions", "samples", "code", "environments"}
    assert len({row["run_id"] for row in found["predictions"]}) == 1
