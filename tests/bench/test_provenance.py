import subprocess
import sys
import time

import pyarrow as pa
import pynvml
import pytest

from tnp.bench import provenance
from tnp.bench.provenance import Conditions, device_slug, environment, throttle_reasons
from tnp.store.schemas import CONDITIONS, PROVENANCE, TABLES


def test_environment_fills_every_column_of_its_table():
    row = environment("cpu")
    added = {"device", "recorded_at"}
    assert set(row) == set(TABLES["environments"].names) - added
    pa.Table.from_pylist([row], schema=pa.schema([f for f in TABLES["environments"]]))
    assert row["device_name"] and row["torch"] and row["cpu_count"] >= 1
    assert row["processor"] == row["device_name"]
    assert {name for name, _ in PROVENANCE} == {"environment_id"} | added


@pytest.mark.parametrize(
    "files, limit",
    [({"cpu.max": "250000 100000\n"}, 2.5), ({"cpu.max": "max 100000\n"}, None), ({}, None),
     ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1.5),
     ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None)],
)  # fmt: skip
def test_a_control_group_limits_the_time_of_processors(files, limit, tmp_path):
    for name, text in files.items():
        tmp_path.joinpath(name).parent.mkdir(exist_ok=True)
        tmp_path.joinpath(name).write_text(text)
    assert provenance.cpu_limit(tmp_path) == limit


def test_the_same_state_has_the_same_id_and_another_has_not(monkeypatch):
    first = environment("cpu")["environment_id"]
    assert environment("cpu")["environment_id"] == first
    monkeypatch.setattr(provenance, "_git", lambda: {"git_commit": "0" * 40, "git_dirty": True})
    assert environment("cpu")["environment_id"] != first


def test_no_nvml_is_the_cpu(monkeypatch):
    def missing():
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert device_slug() == "cpu"
    with Conditions("cuda") as conditions:
        pass
    assert set(conditions.row().values()) == {None}


@pytest.fixture
def one_gpu(monkeypatch):
    """An NVML that knows one H200, which refuses to tell its power."""

    def refuse(_):
        raise pynvml.NVMLError_NotSupported

    for name, value in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda gpu: "NVIDIA H200",
        "nvmlDeviceGetClockInfo": lambda gpu, clock: 1980,
        "nvmlDeviceGetPowerUsage": refuse,
        "nvmlDeviceGetTemperature": lambda gpu, sensor: 61,
        "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: round(time.perf_counter() * 500e3),
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: 0x004 | 0x020,
    }.items():
        monkeypatch.setattr(pynvml, name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_gpu_has_a_readable_slug(one_gpu, monkeypatch):
    assert device_slug() == "nvidia-h200"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_slug() == "cpu"


def test_conditions_of_a_throttled_gpu(one_gpu, monkeypatch):
    monkeypatch.setattr(provenance, "SAMPLING_INTERVAL_S", 0.001)
    with Conditions("cuda") as conditions:
        while not conditions._readings:
            pass
    row = conditions.row()
    assert set(row) < {name for name, _ in CONDITIONS}
    assert row["sm_clock_mhz_mean"] == row["sm_clock_mhz_min"] == 1980
    assert row["power_w_mean"] is None
    assert row["throttle_reasons"] == "sw_power_cap|sw_thermal_slowdown"
    assert row["throttled"] is True
    assert throttle_reasons(0x001) == "" and throttle_reasons(0x004) == "sw_power_cap"
    assert not 0x004 & provenance.SLOWDOWNS  # a power cap is named, and is no slowdown


def test_the_slug_needs_no_torch():
    code = "import sys, tnp.bench.isolate, tnp.bench.provenance as p; p.device_slug()"
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=provenance.ROOT)


def test_energy_is_the_counters_and_needs_a_second(one_gpu, monkeypatch):
    """A GPU that draws 500 W; the counter is too coarse for less than a second."""
    monkeypatch.setattr(provenance, "SAMPLING_INTERVAL_S", 0.01)
    with Conditions("cuda") as conditions:
        time.sleep(1.2)
    began, ended = conditions._readings[0].at_s, conditions._readings[-1].at_s
    assert conditions.power_w(began, ended) == pytest.approx(500, rel=0.01)
    assert conditions.power_w(began, began + 0.9) is None
    assert conditions.sm_clock_mhz(ended) == 1980
    assert conditions.sm_clock_mhz(began - 1) is None
