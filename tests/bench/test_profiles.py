"""Tests what is read of Nsight Compute's table, and what a row holds without one."""

import json
import os
import re
from pathlib import Path

import pyarrow as pa
import pytest

from tests import false_ncu
from tests.false_ncu import COLUMNS, full, table
from tnp.bench import ncu
from tnp.bench.isolate import run_isolated
from tnp.bench.outcome import failure_rows, op_job
from tnp.bench.profiles import measure_profiles
from tnp.dispatch.registry import catalog
from tnp.experiment.failures import Unsupported
from tnp.store.schemas import TABLES


def test_a_table_of_two_kernels_becomes_two_rows():
    first, second = ncu.parsed(table(COLUMNS))
    assert first["launch"] == 0 and second["launch"] == 1
    assert first["kernel"] == "cutlass::device_kernel<flash::Kernel<(int)64>>"
    assert second["kernel"] == "at::native::fill<float>"
    assert first["duration_us"] == 1234.56 and second["duration_us"] == 2.05
    assert first["shared_bytes"] == 213120 and first["registers"] == 168
    assert first["sm_percent"] == 88.01 and first["dram_percent"] == 71.25
    assert first["memory_percent"] == 72.5 and first["l2_percent"] == 40.5
    assert first["occupancy_percent"] == 18.5
    assert first["theoretical_occupancy_percent"] == 18.75
    assert first["l2_hit_percent"] == 33.33 and second["l2_hit_percent"] is None
    assert not any(name.startswith("stall") for name in first)
    few = {name: values for name, values in COLUMNS.items() if not name.startswith("lts__")}
    first, _ = ncu.parsed(table(few))
    assert first["l2_percent"] is None and first["l2_hit_percent"] is None
    assert len(ncu.shortened(f"void k<{'x' * 500}>(int)")) == ncu.MOST_CHARACTERS


@pytest.mark.parametrize(("unit", "us"), [("ns", 1.5), ("nsecond", 1.5), ("usecond", 1500.0),
                                          ("ms", 1.5e6), ("fortnight", None)])  # fmt: skip
def test_durations_are_in_microseconds_whatever_the_unit(unit: str, us: float | None):
    columns = COLUMNS | {ncu.DURATION: (unit, "1,500", "1")}
    if us is None:
        with pytest.raises(ValueError, match="gpu__time_duration.sum in 'fortnight'"):
            ncu.parsed(table(columns))
    else:
        assert ncu.parsed(table(columns))[0]["duration_us"] == pytest.approx(us)


def test_the_three_longest_waits_are_shares_of_all_states():
    first, second = ncu.parsed(table(full()))
    assert (first["stall_1"], first["stall_1_percent"]) == ("long scoreboard", 60.0)
    assert (first["stall_2"], first["stall_2_percent"]) == ("wait", 20.0)
    assert (first["stall_3"], first["stall_3_percent"]) == ("barrier", 5.0)
    assert (second["stall_1"], second["stall_1_percent"]) == ("wait", 75.0)
    assert "stall_2" not in second  # nothing else was waited for


@pytest.mark.parametrize("value", ["n/a", "", "nan", "inf", "(!) n/a", "1.5 KB"])
def test_a_value_that_is_no_number_is_null(value: str):
    waits = false_ncu.STALLED.format("wait")
    columns = full() | {ncu.DURATION: ("us", value, "1"), waits: ("inst", value, "1")}
    first, second = ncu.parsed(table(columns))
    assert first["duration_us"] is None and second["duration_us"] == 1
    assert "wait" not in (first["stall_1"], first["stall_2"], first["stall_3"])


def test_without_a_table_or_with_an_empty_one_there_are_no_kernels():
    assert ncu.parsed("==WARNING== No kernels were profiled.\n") == []
    before, names, units, *_ = table(COLUMNS).splitlines()
    assert ncu.parsed("\n".join([before, names, units])) == []
    assert ncu.parsed(names) == []


def test_a_table_that_was_cut_off_or_is_of_another_page_is_named():
    cut = table(full()).splitlines()[:-1]
    cut[-1] = cut[-1][:100]
    with pytest.raises(ValueError, match=r"line 4 of ncu's table has \d+ values and its first 27"):
        ncu.parsed("\n".join(cut))
    with pytest.raises(ValueError, match="no column 'Kernel Name': its first is 'ID'"):
        ncu.parsed('"ID","Section Name","Metric Value"\n"","",""\n"0","Occupancy","50"\n')


# ------------------------------------------------------------------------------ with a false `ncu`


def parameters(tmp_path: Path, op: str = "swiglu", name: str = "torch", **sizes: int) -> dict:
    problem = catalog().operator(op).problem("float32", **(sizes or {"rows": 2, "width": 8}))
    job = op_job(problem, [name], "profiles--tiny", {}, device="cpu", device_slug="cpu",
                 replicate=1, timing={}, shape="tiny", sections="quick")  # fmt: skip
    return job | {"implementation": name, "reports": str(tmp_path / "reports")}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a false `ncu` on the path."""

    def write(taken: str, printed: str = "") -> None:
        folder = tmp_path / "bin"
        false_ncu.install(folder, taken, printed)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    return write


def test_every_kernel_of_every_pass_is_a_row_that_fits_its_table(install, tmp_path: Path):
    """The child is a process of its own, of which the parent adds one run and one environment."""
    install('touch "$report"', table(full()))
    tables = run_isolated("profile", parameters(tmp_path) | {"sections": "full"}, 300)
    rows = tables["profiles"]
    assert [(row["pass"], row["launch"]) for row in rows] == [
        ("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)
    ]  # fmt: skip
    assert {row["status"] for row in rows} == {"ok"}
    assert {row["ncu"] for row in rows} == {"2025.3.1.0"}
    assert len({row["run_id"] for row in rows}) == len(tables["environments"]) == 1
    assert json.loads(rows[0]["problem"])["op"] == "swiglu"
    assert set(rows[0]) == set(TABLES["profiles"].names)
    pa.Table.from_pylist(rows, schema=TABLES["profiles"])
    reports = [file.name for file in (tmp_path / "reports").iterdir()]
    assert sorted(reports) == ["backward.ncu-rep", "forward.ncu-rep"]
    # Only work between start and stop is profiled, at the clocks as they are.
    _, taken, *_ = [""] + (tmp_path / "bin" / "calls").read_text().splitlines()
    assert "--profile-from-start off" in taken and "--clock-control none" in taken
    assert "--set full" in taken and "tnp.bench.profile_launch" in taken


def test_without_ncu_a_row_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(ncu, "TOOLKIT", str(tmp_path))
    rows = measure_profiles(parameters(tmp_path))
    assert [(row["pass"], row["status"]) for row in rows] == [
        ("forward", "unsupported"), ("backward", "unsupported")
    ]  # fmt: skip
    assert "ncu is neither on the path nor in" in rows[0]["reason"]
    assert "kernel" not in rows[0]
    with pytest.raises(Unsupported, match=str(tmp_path)):
        ncu.executable()


FAILED = '"$@"; echo "==ERROR== The application returned an error code (1)."'
KEPT = (
    "echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU"
    " Performance Counters on the target device 0.'; exit 1"
)
SWIGLU, QUACK = ("swiglu", "torch"), ("rms_norm", "quack")


@pytest.mark.parametrize(
    ("taken", "printed", "job", "status", "said"),
    [
        (KEPT, "", SWIGLU, "unsupported", "NVreg_RestrictProfilingToAdminUsers=0"),
        (FAILED, "", QUACK, "unsupported", "quack"),
        (FAILED, "", SWIGLU, "error", "(?i)cuda"),  # there is no GPU to profile
        ("echo '==ERROR== Failed to load the driver.'; exit 9", "", SWIGLU, "error",
         "ncu wrote no report: Failed to load the driver.$"),
        ('touch "$report"', "==WARNING== No kernels were profiled.\n", SWIGLU, "error",
         "ncu saw no kernel"),
        ("exit 1", table(full()), SWIGLU, "error", ""),  # an old report is no result
    ],
)  # fmt: skip
def test_without_a_profile_a_row_says_why(
    install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken, printed, job, status, said
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    install(taken, printed)
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "forward.ncu-rep").touch()
    sizes = {"rows": 2, "width": 8}
    (row,) = measure_profiles(parameters(tmp_path, *job, **sizes) | {"passes": ["forward"]})
    assert row["status"] == status and re.search(said, row["reason"])


def test_a_process_that_was_killed_has_a_row_a_pass(tmp_path: Path):
    rows = failure_rows("profile", parameters(tmp_path), "timeout", "not finished after 1 s")
    assert [row["pass"] for row in rows["profiles"]] == ["forward", "backward"]
    pa.Table.from_pylist(rows["profiles"], schema=TABLES["profiles"])
