"""Tests the spreading of jobs over several GPUs of a host. NVML is replaced: there is no GPU."""

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pynvml
import pytest

from workflow import gpus
from workflow.jobs import job

GATES_AT_ONCE = 4  # as many as 140 GiB allow
# A module in place of pynvml.
PYNVML_WITH_FOUR_GPUS = """
class NVMLError(Exception): pass
class Memory: free = total = 140 * 2**30
nvmlInit = nvmlShutdown = lambda: None
nvmlDeviceGetCount = lambda: 4
nvmlDeviceGetHandleByIndex = lambda index: index
nvmlDeviceGetName = lambda gpu: "NVIDIA H200"
nvmlDeviceGetMemoryInfo = lambda gpu: Memory
"""


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


def test_the_first_visible_gpus_are_named_as_cuda_names_them(monkeypatch):
    host(monkeypatch, *["NVIDIA H100"] * 4)
    assert gpus.first_visible(1, "cuda", True) == []
    assert gpus.first_visible(3, "cuda", True) == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-1")
    assert gpus.first_visible(2, "cuda", True) == ["3", "GPU-1"]


@pytest.mark.parametrize(
    ("n", "device", "is_local", "said"),
    [
        (4, "cuda", True, "gpus: 4, but 3 can be seen: use at most that"),
        (3, "cuda", True, "GPU 2 is a nvidia-l4 and GPU 0 a nvidia-h100: name GPUs of one model"),
        (2, "cpu", True, "gpus: 2, but the device is the CPU"),
        (2, "cuda", False, "gpus: 2 is for one host: a cluster has --jobs"),
    ],
)
def test_too_few_mixed_or_remote_gpus_are_refused(monkeypatch, n, device, is_local, said):
    host(monkeypatch, "NVIDIA H100", "NVIDIA H100", "NVIDIA L4")
    with pytest.raises(ValueError, match=said):
        gpus.first_visible(n, device, is_local)


def test_a_job_sees_its_gpu_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with job("a job", tmp_path / "log", None, capture=False):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    with job("a job", tmp_path / "log", "3", capture=False):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"


def test_all_steps_of_a_shape_take_the_whole_of_one_gpu(tmp_path):
    (tmp_path / "pynvml.py").write_text(PYNVML_WITH_FOUR_GPUS)
    command = "-m snakemake -n headline fp8 attention --quiet host --cores 64 --config gpus=4"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    planned = subprocess.run(
        [sys.executable, *command.split()],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    taken = defaultdict(set)
    for entry in re.split(r"\n(?=rule )", planned):
        name = re.search(r"wildcards: (?:gate|config_id)=([\w-]+)", entry)
        shares = [int(n) for n in re.findall(r"\bgpu\d=(\d)", entry)]
        if name is None:
            continue
        assert len(shares) == 4
        assert sorted(shares)[:3] == [0, 0, 0]
        if entry.startswith("rule gate"):
            assert 1 <= max(shares) <= GATES_AT_ONCE
            taken["gates"].add(shares.index(max(shares)))
        else:
            assert max(shares) == GATES_AT_ONCE
            assert "threads: 16" in entry  # a quarter of 64
            taken[name[1].split("--")[1]].add(shares.index(GATES_AT_ONCE))
    assert taken.pop("gates") == {0, 1, 2, 3}
    assert {"small", "mid", "mid_b1", "large", "odd"} <= taken.keys()
    assert all(len(where) == 1 for where in taken.values())
    assert set.union(*taken.values()) == {0, 1, 2, 3}
