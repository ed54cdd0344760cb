"""Reads a row's provenance (device, software, commit) and the GPU's state during timing."""

import hashlib
import json
import os
import platform
import re
import subprocess
import threading
import time
from bisect import bisect_right
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tnp.dispatch import devices
from tnp.dispatch.registry import version
from tnp.util.extras import require

pynvml = require("pynvml", "measurements", "workflow")

ROOT = Path(__file__).parents[2]
# A measurement depends on these files. Edits of other files do not make its commit dirty.
SOURCES = ("tnp", "workflow", "Snakefile", "config.yaml", "requirements.txt")

SAMPLING_INTERVAL_S = 0.05
SHORTEST_ENERGY_S = 1.0
# NVML's clocks-event reasons; an idle GPU (bit 0) is no reason.
REASONS = {
    0x002: "user_defined_clocks",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake",
    0x100: "display_clocks",
}
SLOWDOWNS = 0x008 | 0x020 | 0x040 | 0x080


@contextmanager
def _first_visible_gpu():
    """Yields the NVML handle of CUDA's device 0, or None without a GPU or NVML."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    try:
        if first.isdigit():
            yield _read(pynvml.nvmlDeviceGetHandleByIndex, int(first))
        else:
            yield _read(pynvml.nvmlDeviceGetHandleByUUID, first)
    finally:
        pynvml.nvmlShutdown()


def device_slug() -> str:
    """Returns the first visible NVIDIA GPU's name, "nvidia-h200", or "cpu". Imports no torch."""
    with _first_visible_gpu() as gpu:
        return "cpu" if gpu is None else devices.slug(pynvml.nvmlDeviceGetName(gpu))


def gpu_uuid() -> str | None:
    """Returns the UUID of the first visible NVIDIA GPU, or None. Imports no torch."""
    with _first_visible_gpu() as gpu:
        found = None if gpu is None else _read(pynvml.nvmlDeviceGetUUID, gpu)
        return found.decode() if isinstance(found, bytes) else found


def free_gb() -> float | None:
    """Returns the first visible NVIDIA GPU's free memory in GB of 2**30 bytes, or None."""
    with _first_visible_gpu() as gpu:
        found = None if gpu is None else _read(pynvml.nvmlDeviceGetMemoryInfo, gpu)
        return None if found is None else found.free / 2**30


@dataclass(frozen=True)
class Reading:
    """Holds NVML's readings at a time of `time.perf_counter`. A reading may be None."""

    at_s: float
    sm_clock_mhz: int | None
    power_mw: int | None
    temperature_c: int | None
    throttle_bits: int | None
    energy_mj: int | None  # since the driver was loaded


class Conditions:
    """Samples clock, power, temperature, energy and throttle reasons of the GPU while open.

    `row()` gives columns of tables `steps` and `ops`. They are None on the CPU and without NVML.
    """

    def __init__(self, device_type: str) -> None:
        self._wanted = device_type == "cuda"
        self._readings: list[Reading] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Conditions":
        if self._wanted:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._wanted:
            self._thread.join()

    def _run(self) -> None:
        with _first_visible_gpu() as gpu:
            while gpu is not None and not self._stop.is_set():
                self._readings.append(_reading(gpu))
                self._stop.wait(SAMPLING_INTERVAL_S)

    def row(self) -> dict[str, float | str | bool | None]:
        clocks, powers, temperatures, reasons = (
            self._known(name)
            for name in ("sm_clock_mhz", "power_mw", "temperature_c", "throttle_bits")
        )
        seen = 0
        for bits in reasons:
            seen |= bits
        return {
            "sm_clock_mhz_mean": sum(clocks) / len(clocks) if clocks else None,
            "sm_clock_mhz_min": float(min(clocks)) if clocks else None,
            "power_w_mean": sum(powers) / len(powers) / 1e3 if powers else None,
            "temperature_c_max": float(max(temperatures)) if temperatures else None,
            "throttle_reasons": throttle_reasons(seen) if reasons else None,
            "throttled": bool(seen & SLOWDOWNS) if reasons else None,
        }

    def _known(self, name: str) -> list[int]:
        values = [getattr(reading, name) for reading in self._readings]
        return [value for value in values if value is not None]

    def sm_clock_mhz(self, at_s: float) -> float | None:
        """Returns the last clock read before `at_s`, a time of `time.perf_counter`, or None."""
        before = bisect_right(self._readings, at_s, key=lambda reading: reading.at_s)
        clock = self._readings[before - 1].sm_clock_mhz if before else None
        return None if clock is None else float(clock)

    def power_w(self, from_s: float, to_s: float) -> float | None:
        """Returns the mean power between two times, from the energy counter.

        Returns None below `SHORTEST_ENERGY_S` seconds: the counter moves in steps of about 0.1 s.
        """
        inside = [
            reading
            for reading in self._readings
            if from_s <= reading.at_s <= to_s and reading.energy_mj is not None
        ]
        if len(inside) < 2 or to_s - from_s < SHORTEST_ENERGY_S:
            return None
        first, last = inside[0], inside[-1]
        return (last.energy_mj - first.energy_mj) / (last.at_s - first.at_s) / 1e3


def _reading(gpu) -> Reading:
    return Reading(
        time.perf_counter(),
        _read(pynvml.nvmlDeviceGetClockInfo, gpu, pynvml.NVML_CLOCK_SM),
        _read(pynvml.nvmlDeviceGetPowerUsage, gpu),
        _read(pynvml.nvmlDeviceGetTemperature, gpu, pynvml.NVML_TEMPERATURE_GPU),
        _read(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu),
        _read(pynvml.nvmlDeviceGetTotalEnergyConsumption, gpu),
    )


def _read(query, *arguments):
    try:
        return query(*arguments)
    except pynvml.NVMLError:  # this GPU has no such reading, or this user may not ask
        return None


def throttle_reasons(bits: int) -> str:
    """Returns the names of NVML's reason bits, joined by "|"; "" for none."""
    return "|".join(name for bit, name in REASONS.items() if bits & bit)


def environment(device_type: str) -> dict[str, object]:
    """Returns the row of table `environments` without `device` and `recorded_at`.

    `environment_id` is a hash of all the rest: rows measured in the same state share it.
    """
    import torch

    row = _gpu(torch) if device_type == "cuda" else _cpu()
    row |= {
        "torch": torch.__version__,
        "triton": version("triton"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": len(os.sched_getaffinity(0)),
        **_git(),
        "torch_threads": torch.get_num_threads(),
        "packages": json.dumps(_packages()),
        "processor": _processor(),
        "cpu_limit": cpu_limit(),
    }
    state = json.dumps(row, sort_keys=True).encode()
    return {"environment_id": hashlib.sha256(state).hexdigest()[:12]} | row


def _gpu(torch) -> dict[str, object]:
    properties = torch.cuda.get_device_properties(0)
    with _first_visible_gpu() as gpu:
        driver = _read(pynvml.nvmlSystemGetDriverVersion)  # None without NVML
        limit_mw = _read(pynvml.nvmlDeviceGetPowerManagementLimit, gpu) if gpu is not None else None
        uuid = _read(pynvml.nvmlDeviceGetUUID, gpu) if gpu is not None else None
    cudnn = torch.backends.cudnn.version()
    return {
        "device_name": properties.name,
        "sm_count": properties.multi_processor_count,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "driver": driver,
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
        "gpu_uuid": uuid,
        "power_limit_w": None if limit_mw is None else limit_mw / 1e3,
    }


def _cpu() -> dict[str, object]:
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    unknown = ("sm_count", "compute_capability", "driver", "cuda", "cudnn", "gpu_uuid")
    row = dict.fromkeys((*unknown, "power_limit_w"))
    return {"device_name": _processor(), "memory_bytes": pages * page_bytes} | row


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.+)$", info.read_text() if info.exists() else "", re.M)
    return names[0] if names else platform.machine()


def cpu_limit(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Returns how many CPUs the control group at `root` allows, or None without a limit.

    Reads `cpu.max` of version 2, or quota and period of version 1 in folder `cpu`.
    """
    files = [root / "cpu.max"]
    if not files[0].exists():
        files = [root / f"cpu/cpu.cfs_{name}_us" for name in ("quota", "period")]
    if not all(file.exists() for file in files):
        return None
    quota, period = " ".join(file.read_text() for file in files).split()
    return None if quota in ("max", "-1") else int(quota) / int(period)


def _packages() -> dict[str, str]:
    """Returns {name: version} of every installed distribution."""
    found = {
        distribution.metadata["Name"]: distribution.version
        for distribution in metadata.distributions()
    }
    return {name: found[name] for name in sorted(filter(None, found), key=str.lower)}


def _git() -> dict[str, object]:
    """Returns the commit and whether the sources differ from it; None outside a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        dirty = bool(git("status", "--porcelain", "--", *SOURCES))
    except (OSError, subprocess.CalledProcessError):
        return {"git_commit": None, "git_dirty": None}
    return {"git_commit": commit, "git_dirty": dirty}
