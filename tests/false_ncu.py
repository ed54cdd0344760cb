"""Stands for Nsight Compute: a table as `ncu --csv --page raw` prints it, and a program `ncu`."""

import stat
from pathlib import Path

STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
COLUMNS = {  # a table in ncu's own format: metric → its unit, and a value for each kernel
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": ("%", "71.25", "3.5"),
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": ("%", "72.5", "9.75"),
    "gpu__time_duration.sum": ("us", "1,234.56", "2.05"),
    "launch__grid_size": ("", "2,097,152", "1"),
    "launch__registers_per_thread": ("register/thread", "168", "32"),
    "launch__shared_mem_per_block": ("Kbyte/block", "213.12", "1.02"),
    "lts__t_sector_hit_rate.pct": ("%", "33.33", "n/a"),
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": ("%", "40.5", "2"),
    "sm__maximum_warps_per_active_cycle_pct": ("%", "18.75", "100"),
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": ("%", "88.01", "1.5"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("%", "18.5", "61.9"),
}
STALLS = {
    "long_scoreboard": ("inst", "6.00", "0"),
    "selected": ("inst", "1.00", "1"),
    "wait": ("inst", "2.00", "3"),
    "barrier": ("inst", "0.50", "0"),
    "math_pipe_throttle": ("inst", "0.50", "0"),
}
ABOUT = ("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream",
         "Block Size", "Grid Size", "Device", "CC")  # fmt: skip
FORWARD = (
    "void cutlass::device_kernel<flash::Kernel<(int)64>>(T1::Params)",
    "void at::native::(anonymous namespace)::fill<float>(float *, long)",
)


def table(columns: dict[str, tuple[str, ...]], kernels: tuple[str, ...] = FORWARD) -> str:
    """As `ncu --csv --page raw` prints it, between lines of its own."""
    about = dict.fromkeys(ABOUT, "") | {"Block Size": "block", "Grid Size": "grid"}
    lines = [[*about, *columns], [*about.values(), *(unit for unit, *_ in columns.values())]]
    for index, kernel in enumerate(kernels):
        values = [found[index] for _, *found in columns.values()]
        where = [str(index), "4242", "python3.12", "127.0.0.1", kernel, "1", "13", "(384, 1, 1)",
                 "(132, 1, 1)", "0", "9.0"]  # fmt: skip
        lines.append([*where, *values])
    quoted = (",".join(f'"{value}"' for value in line) for line in lines)
    return "\n".join(["==PROF== Connected to process 4242", *quoted, "==PROF== Done", ""])


def full() -> dict[str, tuple[str, ...]]:
    """Columns of `sections: full`, which say why warps wait."""
    return COLUMNS | {STALLED.format(name): values for name, values in STALLS.items()}


def install(folder: Path, taken: str, printed: str = "") -> None:
    """Writes a program `ncu` into a new folder, and what it is called with into its file `calls`.

    An import prints `printed`. A profile does `taken`, where "$report" is the file to write and
    "$@" what to run.
    """
    folder.mkdir()
    (folder / "table.csv").write_text(printed)
    program = folder / "ncu"
    program.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {folder}/calls\n'
        'case "$1" in\n'
        "  --version) echo 'Version 2025.3.1.0 (build 1)' ;;\n"
        f"  --import) cat {folder}/table.csv ;;\n"
        '  *) while [ "$1" != --export ]; do shift; done; report=$2; shift 2\n'
        f"     {taken} ;;\n"
        "esac\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
