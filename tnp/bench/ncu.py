"""Calls NVIDIA Nsight Compute, `ncu`, and reads its table of kernels.

`ncu` writes a report, which its own window opens. The report is printed as a table afterwards, so
that output of the profiled program is not between its lines. Options and metrics have the names of
version 2025.4. A metric that a GPU lacks gives no number.
"""

from __future__ import annotations

import csv
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tnp.experiment.failures import Unsupported

# The CUDA toolkit's folder, in case `ncu` is not on the path.
TOOLKIT = "/usr/local/cuda/bin"

KERNEL = "Kernel Name"
DURATION = "gpu__time_duration.sum"
REGISTERS, SHARED = "launch__registers_per_thread", "launch__shared_mem_per_block"
# Columns of table "profiles" that are shares of a peak, as percentages.
PERCENTAGES = {
    "occupancy_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "theoretical_occupancy_percent": "sm__maximum_warps_per_active_cycle_pct",
    "sm_percent": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "memory_percent": "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_percent": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_hit_percent": "lts__t_sector_hit_rate.pct",
}
# Cycles that a warp spends in each state for every instruction that is issued.
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
# A warp that issues is also in a state, which is no reason to wait.
ISSUES = "selected"
N_STALLS = 3

# Arguments for each value of `sections`. Named sections collect the right metrics on each GPU.
QUICK = ("SpeedOfLight", "Occupancy", "LaunchStats")
SECTIONS = {
    "quick": [argument for name in QUICK for argument in ("--section", name)],
    "full": ["--set", "full"],
}

# Units of times in µs, and of memory in bytes, as older and newer versions write them.
MICROSECONDS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
MICROSECONDS |= {"nsecond": 1e-3, "usecond": 1.0, "msecond": 1e3, "second": 1e6}
BYTES = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6}

FORBIDDEN = "ERR_NVGPUCTRPERM"
WITHOUT_PERMISSION = (
    f"the driver keeps performance counters for administrators ({FORBIDDEN}): set "
    "NVreg_RestrictProfilingToAdminUsers=0 for the module nvidia, or give the container "
    "CAP_SYS_ADMIN"
)

MOST_CHARACTERS = 120  # a kernel's name is cut after so many


class Failed(RuntimeError):
    """Says that a profile was started and gave no kernel."""


def executable() -> str:
    """Returns the path of `ncu`. Raises Unsupported if there is none."""
    found = shutil.which("ncu", path=os.pathsep.join([os.environ.get("PATH", ""), TOOLKIT]))
    if found is None:
        raise Unsupported(
            f"ncu is neither on the path nor in {TOOLKIT}: install NVIDIA Nsight Compute, which "
            "comes with the CUDA toolkit"
        )
    return found


def version(ncu: str) -> str:
    """Returns the version that `ncu --version` prints, such as "2025.3.1.0", or ""."""
    said = subprocess.run([ncu, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"Version (\S+)", said)
    return found[1] if found else ""


def profile(ncu: str, sections: str, report: Path, command: Sequence[str]) -> list[dict]:
    """Runs `command` under `ncu` and returns a row of table "profiles" for each kernel that it saw.

    Kernels are profiled from `cudaProfilerStart` to `cudaProfilerStop`. Each runs several times
    with emptied caches. Clocks stay as they are, as in benchmarks. Nsight Compute would otherwise
    lock them to the lower base clock, a setting of a GPU that others may be using.

    Args:
        ncu: path of the program.
        sections: a key of `SECTIONS`.
        report: file to write, replaced if it is there.
        command: the program to run; it may fail, and reports that in its own way.

    Raises:
        Unsupported: counters may not be read here.
        Failed: no kernel was profiled.
    """
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    metrics = ",".join([DURATION, REGISTERS, SHARED, *PERCENTAGES.values()])
    taken = _run(
        [
            *(ncu, "--profile-from-start", "off", "--target-processes", "application-only"),
            *("--clock-control", "none", "--cache-control", "all", "--replay-mode", "kernel"),
            *SECTIONS[sections],
            *("--metrics", metrics, "--force-overwrite", "--export", str(report)),
            *command,
        ]
    )
    print(taken)
    if FORBIDDEN in taken:
        raise Unsupported(WITHOUT_PERMISSION)
    if not report.exists():
        errors = [line for line in taken.splitlines() if line.startswith("==ERROR==")]
        said = errors[0].removeprefix("==ERROR==").strip() if errors else "it saw no kernel"
        raise Failed(f"ncu wrote no report: {said}")
    page = ("--csv", "--page", "raw", "--print-kernel-base", "demangled")
    rows = parsed(_run([ncu, "--import", str(report), *page]))
    if not rows:
        raise Failed("ncu saw no kernel")
    return rows


def _run(command: Sequence[str]) -> str:
    """Returns a program's output, with points for decimals and commas for thousands."""
    environment = os.environ | {"LC_ALL": "C"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        env=environment, check=False,
    )  # fmt: skip
    return done.stdout


def parsed(text: str) -> list[dict]:
    """Returns rows of table "profiles" without their key, from `ncu --csv --page raw`.

    The table's first line has names, the second units, and each further line a kernel. Other lines
    are ignored. A metric that is missing or not a number is None.

    Raises ValueError for a table without kernels' names, a line of another length than the first,
    and an unknown unit of a time or size.
    """
    lines = text.splitlines()
    starts = [n for n, line in enumerate(lines) if line.startswith('"ID"')]
    if not starts:
        return []
    names, *others = csv.reader(line for line in lines[starts[0] :] if line[:1] == '"')
    if KERNEL not in names:
        raise ValueError(f"ncu's table has no column {KERNEL!r}: its first is {names[0]!r}")
    for place, values in enumerate(others, 2):
        if len(values) != len(names):
            raise ValueError(
                f"line {place} of ncu's table has {len(values)} values and its first "
                f"{len(names)} names: they must be as many"
            )
    by_name = [dict(zip(names, values, strict=True)) for values in others]
    return [_row(index, values, by_name[0]) for index, values in enumerate(by_name[1:])]


def _row(index: int, values: dict[str, str], units: dict[str, str]) -> dict:
    registers = _number(values.get(REGISTERS))
    shared = _scaled(SHARED, values, units, BYTES)
    row = {
        "launch": index,
        "kernel": shortened(values[KERNEL]),
        "duration_us": _scaled(DURATION, values, units, MICROSECONDS),
        "registers": None if registers is None else round(registers),
        "shared_bytes": None if shared is None else round(shared),
    }
    row |= {column: _number(values.get(name)) for column, name in PERCENTAGES.items()}
    cycles = {
        match[1]: _number(values[match[0]]) for match in map(STALL.fullmatch, values) if match
    }
    return row | dict(_stalls({name: found for name, found in cycles.items() if found}))


def _stalls(cycles: dict[str, float]) -> Iterator[tuple[str, str | float]]:
    """Yields the states in which a warp waits longest, as shares of the cycles of all states."""
    whole = sum(cycles.values())
    waiting = sorted((name for name in cycles if name != ISSUES), key=lambda name: -cycles[name])
    for place, name in enumerate(waiting[:N_STALLS], 1):
        yield f"stall_{place}", name.replace("_", " ")
        yield f"stall_{place}_percent", 100 * cycles[name] / whole


def _number(text: str | None) -> float | None:
    """Returns None for text that is no number, such as "n/a" and "nan"."""
    try:
        number = float((text or "").replace(",", ""))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _scaled(
    name: str, values: dict[str, str], units: dict[str, str], known: dict[str, float]
) -> float | None:
    """Returns the value in the unit that is 1 in `known`. "Kbyte/block" counts as "Kbyte"."""
    value, unit = _number(values.get(name)), units.get(name, "").partition("/")[0]
    if value is None:
        return None
    if unit not in known:
        raise ValueError(f"ncu gives {name} in {unit!r}: it must be one of {', '.join(known)}")
    return value * known[unit]


def shortened(name: str) -> str:
    """Returns a demangled name without "void " and its parameters, cut to a readable length."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    depth = 0
    for place, character in enumerate(name):
        depth += (character == "<") - (character == ">")
        if character == "(" and not depth:
            name = name[:place]
            break
    return name if len(name) <= MOST_CHARACTERS else name[: MOST_CHARACTERS - 1] + "…"
