"""From configuration to jobs, and from imports to the files a job depends on."""

from pathlib import Path

import pytest
import yaml

from workflow import plan, sources

CONFIG = yaml.safe_load((Path(__file__).parents[2] / "config.yaml").read_text())


def test_ids_say_what_is_measured():
    steps = plan.steps(CONFIG, "cuda", "nvidia-h200")
    parameters = steps["matrix--mid--separate--ckpt--graph"]
    assert parameters["checkpoint"] and parameters["cuda_graph"]
    assert parameters["n_context"] == 10_000
    assert "matrix--mid--separate" in steps
    assert not steps["memory_feasibility--large--sdpa_flash"]["optimizer"]


def test_a_device_takes_part_only_where_it_is_named():
    assert {p["study"] for p in plan.steps(CONFIG, "cpu", "cpu").values()} == {"cpu"}
    assert plan.ops(CONFIG, "cpu", "cpu") == {}


def test_operator_sizes_follow_from_shape_and_model():
    op = plan.ops(CONFIG, "cuda", "nvidia-h200")["attention--mid"]
    assert (op["n_q"], op["n_k"], op["n_heads"], op["head_dim"]) == (11_000, 10_000, 8, 64)


def test_an_operators_implementations_are_one_job_a_size_and_replicate():
    ops = plan.ops(CONFIG, "cuda", "nvidia-h200")
    spec = CONFIG["ops"]["attention"]
    names = spec["implementations"]
    assert ops["attention--mid"]["implementations"] == {
        name: f"attention--mid--{name}" for name in names
    }
    assert ops["ceilings--copy"]["implementations"] == {"torch": "ceilings--copy"}
    jobs = [name for name, _ in plan.running_order(ops) if name.startswith("attention--")]
    assert len(jobs) == len(spec["shapes"]) * spec["replicates"]


def test_training_overrides_its_shape():
    run = plan.training(CONFIG, "cpu", "cpu")["gp_cpu"]
    assert (run["batch"], run["n_context"], run["n_target"]) == (16, 64, 64)
    assert run["model"]["d_model"] == 64


def test_rounds_of_replicates_each_in_its_own_order():
    steps = plan.steps(CONFIG, "cuda", "nvidia-h200")
    order = plan.running_order(steps)
    replicates = [replicate for _, replicate in order]
    assert replicates == sorted(replicates)
    first, second = (
        [name for name, r in order if r == wanted and steps[name]["replicates"] == 3]
        for wanted in (1, 2)
    )
    assert sorted(first) == sorted(second) and first != second
    assert order == plan.running_order(dict(reversed(steps.items())))


@pytest.mark.parametrize(
    ("wanted", "found", "slug"),
    [("auto", "cpu", "cpu"), ("cpu", "nvidia-h200", "cpu"), ("nvidia-a100", "cpu", "nvidia-a100")],
)
def test_device(wanted, found, slug):
    assert plan.device(wanted, found) == slug


def test_cuda_without_gpu_is_refused():
    with pytest.raises(ValueError, match="no NVIDIA GPU is visible"):
        plan.device("cuda", "cpu")


def test_a_kernel_is_a_source_of_what_uses_it_and_of_nothing_else():
    steps = plan.steps(CONFIG, "cuda", "nvidia-h200")
    kernel = "triton_forward.py"

    def uses(files: list[str]) -> bool:
        return any(file.endswith(kernel) for file in files)

    assert uses(sources.of_step(steps["matrix--mid--separate"]))
    assert not uses(sources.of_step(steps["matrix--mid--sdpa_flash"]))
    assert uses(sources.of_gate("attention_forward"))
    assert not uses(sources.of_gate("baseline"))
    assert any(file.endswith("model.py") for file in sources.of_gate("baseline"))
