"""Tests rows of joint samples and of training steps with a buffer. No test asserts a time."""

import time

import pyarrow as pa
import pytest

from tests.bench.configurations import MODEL, step_parameters
from tnp.bench import joint
from tnp.bench.joint import measure_joint
from tnp.bench.outcome import FORMS, JOINT_FORMS, failure_rows
from tnp.bench.predictions import IN_A_ROW
from tnp.model import prediction, sampling
from tnp.store.schemas import PROVENANCE, RUN, TABLES
from tnp.train.step import TrainingStep


def parameters(**changes) -> dict:
    said = {"operators": "{}", "gates": "baseline|buffer", "model": MODEL | {"buffer": 2}}
    about = {"config_id": "joint--tiny--sdpa_flash", "study": "joint"}
    return step_parameters(**about) | said | changes


@pytest.fixture(scope="module")
def tables():
    return measure_joint(parameters(), time.perf_counter())


def test_every_form_has_a_row_that_fits_its_table(tables):
    assert [row["form"] for row in tables["predictions"]] == list(JOINT_FORMS)
    added = {name for name, _ in PROVENANCE + RUN}
    for row in tables["predictions"]:
        assert row["status"] == "ok" and set(row) | added == set(TABLES["predictions"].names)
        assert row["config_id"] == f"joint--tiny--sdpa_flash--{row['form']}"
        assert row["time_ms_min"] <= row["time_ms_p50"] <= row["time_ms_max"]
    pa.Table.from_pylist(tables["predictions"], schema=TABLES["predictions"])


def test_a_row_says_what_was_measured(tables):
    """A sample's time is of one target, and the one that is encoded anew is a stated one."""
    launches = {}
    for row in tables["predictions"]:
        samples = [s for s in tables["samples"] if s["config_id"] == row["config_id"]]
        assert max(s["time_ms"] for s in samples) == row["time_ms_max"]
        (launches[row["form"]],) = {s["n_launches"] for s in samples}
        said = row["reason"].partition(";")[0]
        assert (said == f"{IN_A_ROW} targets over 9 points each were timed") == (
            row["form"] == "drawn_anew"
        )
    assert launches == dict.fromkeys(JOINT_FORMS, IN_A_ROW) | {"drawn": 5}


def test_forms_do_what_they_are_named_for(monkeypatch):
    """`drawn` encodes a run's context once, `drawn_anew` one for each target."""
    done = []
    encode, step = prediction.encode, TrainingStep.__call__

    def encoding(model, context, cuda_graph=False):
        done.append(context.x.shape[1])
        return encode(model, context, cuda_graph)

    def stepping(self, *tasks):
        done.append(self.model.config.buffer)
        return step(self, *tasks)

    for module in (prediction, sampling):
        monkeypatch.setattr(module, "encode", encoding)
    monkeypatch.setattr(TrainingStep, "__call__", stepping)
    found = {}

    def counted(contenders, device, policy):
        for form, (call,) in zip(JOINT_FORMS, contenders, strict=True):
            done.clear()
            call()
            found[form] = list(done)
        raise StopIteration

    monkeypatch.setattr(joint, "measure_interleaved", counted)
    with pytest.raises(StopIteration):
        measure_joint(parameters(), time.perf_counter())
    assert found == {
        "drawn": [7, 10],  # three targets in a run of a buffer of two, then the two that are left
        "drawn_anew": [9] * IN_A_ROW,
        "trained": [2] * IN_A_ROW,
        "trained_plain": [None] * IN_A_ROW,
    }


@pytest.mark.parametrize(
    ("asked", "forms"), [(parameters(), JOINT_FORMS), (parameters(study="predictions"), FORMS)]
)
def test_a_process_that_measures_nothing_has_a_row_for_each_form(asked, forms):
    rows = failure_rows("prediction", asked, "unsupported", "needs a GPU")["predictions"]
    assert [(row["form"], row["status"]) for row in rows] == [(one, "unsupported") for one in forms]
    pa.Table.from_pylist(rows, schema=TABLES["predictions"])
