"""Tests the spreading of jobs over several GPUs of a host. NVML is replaced: there is no GPU."""

import json
import os
from collections import defaultdict

import pynvml
import pytest

from workflow import gpus
from workflow.gpus import Part

# Appended to these files, the text makes a host of two GPUs, whose jobs write down what they see.
ON_A_HOST = {
    "workflow/gpus.py": """
def _models():
    return {"0": "nvidia-h200", "1": "nvidia-h200"}
""",
    "tnp/bench/provenance.py": """
def device_slug():
    return "nvidia-h200"

def free_gb():
    return 140.0

def gpu_uuid():
    return os.environ["CUDA_VISIBLE_DEVICES"]
""",
    "tnp/bench/isolate.py": """
def run_isolated(kind, parameters, timeout_s):
    import json, os
    cores = len(os.sched_getaffinity(0))
    seen = {"name": parameters["config_id"], "gpu": os.environ["CUDA_VISIBLE_DEVICES"]}
    with open("ran", "a") as file:
        print(json.dumps(seen | {"cores": cores}), file=file)
    tables = failure_rows(kind, parameters, "ok", "")
    for row in tables[f"{kind}s"]:
        row["step_ms_p50"] = 1.0
    return with_provenance(tables, parameters["device_slug"], None)
""",
}


def host(monkeypatch: pytest.MonkeyPatch, *models: str) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(models),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": lambda uuid: int(uuid.removeprefix("GPU-")),
        "nvmlDeviceGetName": lambda gpu: models[gpu],
    }.items():
        monkeypatch.setattr(pynvml, name, value)


def taken(monkeypatch: pytest.MonkeyPatch, part: Part, cores: set[int]) -> tuple[str, set[int]]:
    """Returns the GPU and the cores of a job that takes its part of these cores."""
    kept: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, mine: kept.append(set(mine)))
    gpus.take(part)
    return os.environ["CUDA_VISIBLE_DEVICES"], kept[0]


def test_each_part_has_a_gpu_and_cores_of_its_own(monkeypatch):
    host(monkeypatch, *["NVIDIA H100"] * 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-1,0")
    cores, found = {2, 3, 5, 7, 11, 13, 17}, []
    for number in range(3):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-1,0")
        found.append(taken(monkeypatch, Part(number, 3), cores))
    assert [gpu for gpu, _ in found] == ["3", "GPU-1", "0"]
    assert set.union(*(mine for _, mine in found)) == cores
    assert sum(len(mine) for _, mine in found) == len(cores)


def test_every_visible_gpu_is_known_without_the_variable(monkeypatch):
    host(monkeypatch, *["NVIDIA H100"] * 4)
    assert taken(monkeypatch, Part(2, 4), set(range(4))) == ("2", {2})


@pytest.mark.parametrize(
    ("n", "n_cores", "is_local", "said"),
    [
        (4, 8, True, "gpus is 4, but 3 GPUs can be seen: use at most that"),
        (3, 8, True, "GPU 2 is a nvidia-l4 and GPU 0 a nvidia-h100: name GPUs of one model"),
        (2, 1, True, "gpus is 2, but --cores is 1: each GPU needs one"),
        (2, 8, False, "gpus is 2, and for one host alone: a cluster has --jobs"),
    ],
)
def test_what_cannot_share_the_work_is_refused(monkeypatch, n, n_cores, is_local, said):
    host(monkeypatch, "NVIDIA H100", "NVIDIA H100", "NVIDIA L4")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    gpus.check(2, 2, True)
    gpus.check(1, 1, False)
    with pytest.raises(ValueError, match=said):
        gpus.check(n, n_cores, is_local)
    host(monkeypatch)
    with pytest.raises(ValueError, match="gpus is 2, but no NVIDIA GPU can be seen: leave it out"):
        gpus.check(2, 2, True)


def test_all_steps_of_a_shape_run_on_one_gpu(checkout):
    steps = checkout.config["steps"]["cpu"]
    checkout.config["shapes"] |= {
        f"tiny{n}": {"batch": n, "n_context": 24, "n_target": 8} for n in (3, 4)
    }
    steps |= {"devices": ["cuda"], "shapes": list(checkout.config["shapes"])}
    checkout.config |= {"device": "cuda", "gpus": 2}
    for file, text in ON_A_HOST.items():
        checkout.append(file, text)
    status, output = checkout.run("cpu", "gates", "--cores", "8")
    assert status == 0, output
    ran = [json.loads(line) for line in (checkout.folder / "ran").read_text().splitlines()]
    gpus_of = defaultdict(set)
    for one in ran:
        gpus_of[one["name"].split("--")[1]].add(one["gpu"])
        assert one["cores"] <= -(-len(os.sched_getaffinity(0)) // 2)
    assert gpus_of == {"tiny": {"0"}, "tiny3": {"1"}, "tiny4": {"0"}}
    assert len(ran) == 6
