"""Profiles: what is read of Nsight Compute's table, and what stands in a row without one."""

import json
import os
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
from tnp.store.schemas import PROVENANCE, RUN, TABLES


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


@pytest.mark.parametrize(("unit", "us"), [("ns", 1.5), ("nsecond", 1.5), ("usecond", 1500.0),
                                          ("ms", 1.5e6)])  # fmt: skip
def test_durations_are_in_microseconds_whatever_the_unit(unit: str, us: float):
    columns = COLUMNS | {ncu.DURATION: (unit, "1,500", "1")}
    assert ncu.parsed(table(columns))[0]["duration_us"] == pytest.approx(us)


def test_a_unit_that_nobody_knows_is_refused():
    columns = COLUMNS | {ncu.DURATION: ("fortnight", "1", "1")}
    with pytest.raises(ValueError, match="gpu__time_duration.sum in 'fortnight'"):
        ncu.parsed(table(columns))


def test_the_three_longest_waits_are_shares_of_all_states():
    first, second = ncu.parsed(table(full()))
    assert (first["stall_1"], first["stall_1_percent"]) == ("long scoreboard", 60.0)
    assert (first["stall_2"], first["stall_2_percent"]) == ("wait", 20.0)
    assert (first["stall_3"], first["stall_3_percent"]) == ("barrier", 5.0)
    assert (second["stall_1"], second["stall_1_percent"]) == ("wait", 75.0)
    assert "stall_2" not in second  # nothing else was waited for


def test_a_metric_that_is_missing_is_null():
    columns = {name: values for name, values in COLUMNS.items() if not name.startswith("lts__")}
    first, _ = ncu.parsed(table(columns))
    assert first["l2_percent"] is None and first["l2_hit_percent"] is None


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


def test_a_line_that_was_cut_off_is_named():
    cut = table(full()).splitlines()[:-1]
    cut[-1] = cut[-1][:100]
    with pytest.raises(ValueError, match=r"line 4 of ncu's table has \d+ values and its first 27"):
        ncu.parsed("\n".join(cut))


def test_a_table_of_another_page_is_refused():
    with pytest.raises(ValueError, match="no column 'Kernel Name': its first is 'ID'"):
        ncu.parsed('"ID","Section Name","Metric Value"\n"","",""\n"0","Occupancy","50"\n')


def test_a_long_name_is_cut():
    assert len(ncu.shortened(f"void k<{'x' * 500}>(int)")) == ncu.MOST_CHARACTERS


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
    install('touch "$report"', table(full()))
    rows = measure_profiles(parameters(tmp_path))
    assert [(row["pass"], row["launch"]) for row in rows] == [
        ("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)
    ]  # fmt: skip
    assert {row["status"] for row in rows} == {"ok"}
    assert {row["ncu"] for row in rows} == {"2025.3.1.0"}
    assert json.loads(rows[0]["problem"])["op"] == "swiglu"
    added = {name for name, _ in PROVENANCE + RUN}
    assert set(rows[0]) | added == set(TABLES["profiles"].names)
    pa.Table.from_pylist(rows, schema=TABLES["profiles"])
    reports = [file.name for file in (tmp_path / "reports").iterdir()]
    assert sorted(reports) == ["backward.ncu-rep", "forward.ncu-rep"]


def test_only_what_is_between_start_and_stop_is_profiled_at_the_clocks_as_they_are(
    install, tmp_path: Path
):
    install('touch "$report"', table(full()))
    measure_profiles(parameters(tmp_path) | {"sections": "full", "passes": ["forward"]})
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


def test_counters_that_the_driver_keeps_are_unsupported(install, tmp_path: Path):
    install(
        "echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU"
        " Performance Counters on the target device 0.'; exit 1"
    )
    rows = measure_profiles(parameters(tmp_path))
    assert {row["status"] for row in rows} == {"unsupported"}
    assert "NVreg_RestrictProfilingToAdminUsers=0" in rows[0]["reason"]


def test_what_the_launch_failed_of_is_the_reason(
    install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """There is no GPU to profile."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    install('"$@"; echo "==ERROR== The application returned an error code (1)."')
    rows = measure_profiles(parameters(tmp_path) | {"passes": ["forward"]})
    assert [row["status"] for row in rows] == ["error"]
    assert "CUDA" in rows[0]["reason"] or "cuda" in rows[0]["reason"]


def test_an_implementation_that_cannot_run_is_unsupported(install, tmp_path: Path):
    install('"$@"; echo "==ERROR== The application returned an error code (1)."')
    job = parameters(tmp_path, "rms_norm", "quack", rows=2, width=8) | {"passes": ["forward"]}
    assert [row["status"] for row in measure_profiles(job)] == ["unsupported"]


def test_a_profiler_that_fails_is_an_error_with_its_own_words(install, tmp_path: Path):
    install("echo '==ERROR== Failed to load the driver.'; exit 9")
    rows = measure_profiles(parameters(tmp_path) | {"passes": ["forward"]})
    assert [row["status"] for row in rows] == ["error"]
    assert rows[0]["reason"].endswith("ncu wrote no report: Failed to load the driver.")


def test_a_report_without_a_kernel_is_an_error(install, tmp_path: Path):
    install('touch "$report"', "==WARNING== No kernels were profiled.\n")
    (row,) = measure_profiles(parameters(tmp_path) | {"passes": ["forward"]})
    assert row["status"] == "error" and "ncu saw no kernel" in row["reason"]


def test_an_old_report_is_no_result(install, tmp_path: Path):
    install("exit 1", table(full()))
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "forward.ncu-rep").touch()
    (row,) = measure_profiles(parameters(tmp_path) | {"passes": ["forward"]})
    assert row["status"] == "error"


def test_a_process_that_was_killed_has_a_row_a_pass(tmp_path: Path):
    rows = failure_rows("profile", parameters(tmp_path), "timeout", "not finished after 1 s")
    assert [row["pass"] for row in rows["profiles"]] == ["forward", "backward"]
    pa.Table.from_pylist(rows["profiles"], schema=TABLES["profiles"])


def test_a_profile_runs_in_a_process_of_its_own(install, tmp_path: Path):
    install('touch "$report"', table(COLUMNS))
    tables = run_isolated("profile", parameters(tmp_path), 300)
    assert {row["status"] for row in tables["profiles"]} == {"ok"}
    assert len({row["run_id"] for row in tables["profiles"]}) == 1
    assert len(tables["environments"]) == 1


def test_executable_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(ncu, "TOOLKIT", "/nowhere")
    with pytest.raises(Unsupported, match="/nowhere"):
        ncu.executable()
