"""Profiles as the workflow takes them, where a false GPU and a false `ncu` stand for real ones."""

import os
import re

import pytest

from tests import false_ncu
from tests.workflow.conftest import FAKE_GPU, Checkout

GPU = "nvidia-h200"


@pytest.fixture
def profiling(checkout: Checkout) -> Checkout:
    """One that is to profile two implementations of one problem."""
    mlp = {"problems": {"few": {"rows": 8, "d_model": 32, "d_ff": 48}}}
    checkout.config["device"] = GPU
    checkout.config["gates"].append("op--mlp--single")
    checkout.config["profiles"] = {
        "devices": ["cuda"],
        "priority": 1,
        "replicates": 1,
        "sections": "full",
        "ops": {"mlp": mlp | {"implementations": ["torch", "single"]}},
    }
    return checkout


def run(checkout: Checkout, taken: str, *targets: str) -> tuple[int, str]:
    """Where there is a GPU, whose `ncu` does `taken`."""
    for file, text in FAKE_GPU.items():
        checkout.append(file, text)
    folder = checkout.folder.parent / "bin"
    false_ncu.install(folder, taken, false_ncu.table(false_ncu.full()))
    return checkout.run(*targets, PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_they_are_planned_for_a_gpu_and_wait_for_no_gate(profiling: Checkout) -> None:
    status, output = profiling.run("-n", "profiles")
    assert status == 0 and re.search(r"^profile +2$", output, re.MULTILINE), output
    assert not re.search(r"^gate +\d", output, re.MULTILINE)


def test_each_kernel_becomes_a_row_and_each_pass_one_of_the_view(profiling: Checkout) -> None:
    status, output = run(profiling, 'touch "$report"', "profiles", "figures")
    assert status == 0, output
    assert "profiles--mlp--few--single: 4 kernels" in output
    rows = profiling.rows("profiles", GPU)
    assert len(rows) == 2 * 2 * 2  # implementations, passes, kernels
    assert {row["status"] for row in rows} == {"ok"} and {row["device"] for row in rows} == {GPU}
    reports = profiling.folder.glob(f"data/runs/{GPU}/ncu/*/*.ncu-rep")
    assert {f"{file.parent.name} {file.stem}" for file in reports} == {
        f"profiles--mlp--few--{name}--r1 {pass_}"
        for name in ("single", "torch")
        for pass_ in ("backward", "forward")
    }
    view = profiling.store(
        "select implementation, pass, own, n_kernels, duration_us, registers, stall_1, stall_3"
        " from profiled_passes order by all"
    )
    pass_ = (2, 1234.56 + 2.05, 168, "long scoreboard", "barrier")
    assert view == [
        (name, of, name == "single", *pass_)
        for name in ("single", "torch")
        for of in ("backward", "forward")
    ]


def test_counters_that_may_not_be_read_are_a_sentence_and_no_error(profiling: Checkout) -> None:
    status, output = run(profiling, "echo ==ERROR== ERR_NVGPUCTRPERM; exit 1", "profiles")
    assert status == 0, output
    said = "profiles--mlp--few--torch: unsupported: the driver keeps performance counters for admin"
    assert said in output and "Traceback" not in output
    rows = profiling.rows("profiles", GPU)
    assert [(row["status"], row["kernel"]) for row in rows] == [("unsupported", None)] * 4


def test_without_a_gpu_they_are_refused_in_a_sentence(profiling: Checkout) -> None:
    profiling.config["device"] = "cpu"
    status, output = profiling.run("profiles")
    assert status != 0
    assert "'profiles' is for cuda alone, and the device is 'cpu': what can be run here" in output
    assert "Traceback" not in output
