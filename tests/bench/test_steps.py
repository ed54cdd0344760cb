import json
import statistics
import time

import pytest
import torch

from tests.bench.configurations import MODEL, TIMING, step_parameters
from tnp.bench.memory import PeakMemory
from tnp.bench.steps import measure_step, random_task
from tnp.dispatch import selection
from tnp.dispatch.call import forget
from tnp.dispatch.registry import catalog
from tnp.experiment.failures import Unsupported
from tnp.model.config import TNPConfig
from tnp.store.schemas import PROVENANCE, RUN, TABLES
from tnp.tasks.task import Task
from tnp.train.step import TrainingStep

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tables():
    forget()  # what this process's other tests ran
    return measure_step(step_parameters(), time.perf_counter())


def test_a_step_fills_its_row(tables):
    (row,) = tables["steps"]
    added = {name for name, _ in PROVENANCE + RUN}
    assert set(row) | added | {"mfu"} == set(TABLES["steps"].names)
    assert row["status"] == "ok"
    assert row["step_ms_min"] <= row["step_ms_p50"] <= row["step_ms_max"]
    assert row["tokens_per_s"] == pytest.approx(2 * (7 + 5) / row["step_ms_p50"] * 1e3)
    assert row["tflops"] == pytest.approx(row["flops"] / row["step_ms_p50"] / 1e9)
    assert row["n_samples"] >= TIMING["min_samples"]
    assert row["setup_s"] > 0 and row["compile_s"] > 0


SIZES = [(7, 5), (7, 5)]  # of the samples of `step_parameters`


def test_a_step_records_what_auto_chose(tables, monkeypatch):
    assert tables["steps"][0]["choices"] is None
    monkeypatch.setattr(selection, "_logged", {})  # of this process's other tests
    spec = {"attention": "sdpa_flash", "mlp": "auto", "mixture_heads": "auto"}
    (row,) = measure_step(step_parameters(variant_spec=spec), time.perf_counter())["steps"]
    chosen = {(c["op"], c["implementation"], c["source"]) for c in json.loads(row["choices"])}
    assert chosen == {("mlp", "torch", "default"), ("mixture_heads", "torch", "default")}


def test_a_step_records_the_kernels_and_configurations_of_ours(tables):
    assert tables["steps"][0]["launch_config"] is None  # nothing of ours ran
    forget()
    spec = {"attention": "fused"}
    (row,) = measure_step(step_parameters(variant_spec=spec), time.perf_counter())["steps"]
    (found,) = json.loads(row["launch_config"])
    assert json.loads(found["problem"])["op"] == "attention" and found["mode"] == "training"
    assert found["attention.forward"]["config"] and found["attention.fused"]["config"]


def test_samples_are_the_raw_material_of_the_row(tables):
    (row,) = tables["steps"]
    times = sorted(sample["time_ms"] for sample in tables["samples"])
    assert [sample["sample"] for sample in tables["samples"]] == list(range(len(times)))
    assert (times[0], times[-1]) == (row["step_ms_min"], row["step_ms_max"])
    assert statistics.median(times) == pytest.approx(row["step_ms_p50"])
    assert "stages" not in tables  # of a CPU


def test_inputs_are_random_and_a_function_of_the_replicate():
    config = TNPConfig(**MODEL)
    tasks = [random_task(step_parameters(replicate=r), config, CPU, SIZES) for r in (0, 0, 1)]
    assert torch.equal(tasks[0].y_context, tasks[1].y_context)
    assert not torch.equal(tasks[0].y_context, tasks[2].y_context)
    assert tasks[0].x_context.std() > 0.5


def test_a_diverging_step_is_not_timed(monkeypatch):
    monkeypatch.setattr("tnp.bench.steps.LEARNING_RATE", 1e38)
    with pytest.raises(RuntimeError, match="the loss is nan"):
        measure_step(step_parameters(), time.perf_counter())


@pytest.mark.parametrize(
    "changes", [{"cuda_graph": True}, {"variant_spec": {"attention": "sdpa_cudnn"}}]
)
def test_what_the_cpu_cannot_run_is_refused_before_work(changes):
    with pytest.raises(Unsupported):
        measure_step(step_parameters(**changes), time.perf_counter())


def test_a_package_that_is_not_installed_is_named_before_work(monkeypatch):
    monkeypatch.setattr("tnp.dispatch.registry.version", lambda name: None)
    catalog.cache_clear()
    with pytest.raises(Unsupported, match="mlp 'torchao': package torchao is not installed: pip"):
        measure_step(step_parameters(variant_spec={"mlp": "torchao"}), time.perf_counter())
    catalog.cache_clear()


def test_peak_memory_of_the_cpu_sees_what_was_freed_again():
    memory = PeakMemory(CPU)
    memory.reset()
    torch.ones(64 * 2**18).sum()  # 64 MiB
    assert 50 * 2**20 < memory.read() < 200 * 2**20
    memory.reset()
    assert memory.read() < 50 * 2**20


@pytest.fixture
def met(monkeypatch) -> list[Task]:
    """Collects the tasks of all steps that run."""
    found = []

    class Counting(TrainingStep):
        def __call__(self, task):
            found.append(task)
            return super().__call__(task)

    monkeypatch.setattr("tnp.bench.steps.TrainingStep", Counting)
    return found


def test_a_shape_whose_sizes_vary_is_timed_over_a_stream_of_tasks(monkeypatch, met):
    monkeypatch.setattr("tnp.bench.steps.N_VARYING", 8)
    parameters = step_parameters(vary={"n_context": [3, 11], "n_target": [2, 8]})
    tables = measure_step(parameters, time.perf_counter())
    sizes = [(task.n_context, task.n_target) for task in met]
    (row,), stream = tables["steps"], sizes[:8]
    assert len(set(stream)) > 4 and sizes == stream * (len(sizes) // 8)
    assert all(3 <= m <= 11 and 2 <= n <= 8 for m, n in stream)
    rows = 2 * sum(m + n for m, n in stream) / 8
    assert row["tokens_per_s"] == pytest.approx(rows / row["step_ms_p50"] * 1e3)
    assert {sample["n_launches"] for sample in tables["samples"]} == {8} and "stages" not in tables


@pytest.mark.parametrize("pack", [False, True])
def test_samples_of_sizes_of_their_own_are_counted_without_padding(monkeypatch, met, pack):
    monkeypatch.setattr("tnp.bench.steps.N_VARYING", 3)
    vary = {"each": "sample", "n_context": [3, 40], "n_target": [2, 80]}
    spec = {"attention": "sdpa_flash", "pack": pack}
    parameters = step_parameters(vary=vary, batch=8, variant_spec=spec)
    (row,) = measure_step(parameters, time.perf_counter())["steps"]
    points = [int(task.context_lengths.sum() + task.target_lengths.sum()) for task in met[:3]]
    assert row["tokens_per_s"] == pytest.approx(sum(points) / 3 / row["step_ms_p50"] * 1e3)
    padded = 1 - sum(points) / sum(8 * (task.n_context + task.n_target) for task in met[:3])
    assert padded > 0.3
    # Without packing a bucket's rows come on top.
    assert row["padded_share"] < 0.15 if pack else padded <= row["padded_share"] < padded + 0.15
