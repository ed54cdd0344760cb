"""Times one problem of an operator with every installed implementation.

    python -m tnp.bench rope --help
    python -m tnp.bench swiglu --rows 16384 --width 14336 --both
    python -m tnp.bench swiglu --rows 64 --width 512 --dtype float32 --implementations torch triton
    python -m tnp.bench attention --suite --warmup 0.5

Each operator declares its sizes and options. The table has a row for each implementation: its
medians, or the reason why it did not run. After timing, results are compared with float64 and with
PyTorch's. All implementations take turns in one process, on the first visible GPU or the CPU.
`--suite` times all problems that the operator declares for comparisons with other libraries.
`tnp.bench.compare` does the same in Python.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from tnp.bench import asked, comparison
from tnp.bench.comparison import CLOSE, Comparison
from tnp.bench.policy import Policy
from tnp.dispatch import devices
from tnp.dispatch.devices import Datasheet
from tnp.dispatch.registry import catalog
from tnp.dispatch.spec import FLOATS, ITEMSIZE, PASSES, Operator, Problem
from tnp.util.cli import Parser, end_with, seconds, size, table

PROGRAM = "python -m tnp.bench"
COLUMNS = (
    *("implementation", "provider", "forward µs", "backward µs", "rate", "of peak", "over {}"),
    *("max error", "close", ""),
)
LEGEND = (
    "over {}: its time divided by the row's, over all timed passes. max error: the largest "
    "absolute difference between an element of any result and float64. of peak: the rate as a "
    "share of the datasheet's, for operations in 16 bits or for memory. close: whether no element "
    f"differs from PyTorch's by more than {CLOSE:g} (torch.allclose with atol={CLOSE:g}, rtol=0), "
    "and the largest difference"
)
NUMBERS = (2, 3, 4, 5, 6, 7)  # columns that are aligned to the right


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns exit code 0, 1 if nothing could be timed, or 2 for wrong arguments."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    outer = Parser(prog=PROGRAM, description=__doc__, add_help=False,
                   formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    outer.add_argument("operator", help=f"one of {', '.join(catalog().operators)}")
    if not arguments or arguments[0] in ("-h", "--help"):
        outer.print_help()
        return 0 if arguments else 2
    for fault in catalog().faults:
        print(fault, file=sys.stderr)
    try:
        operator = catalog().operator(arguments[0])
    except ValueError as error:
        outer.error(str(error))
    parser = _parser(operator, sized="--suite" not in arguments)
    wanted = parser.parse_args(arguments[1:])
    passes = PASSES if wanted.both else ("backward",) if wanted.backward else ("forward",)
    try:
        problems = _problems(operator, wanted)
        names = comparison.resolved(operator, wanted.implementations)
        comparison.require_passes(operator, passes)
    except ValueError as error:
        parser.error(str(error))
    # Imported here, so that --help works without the optional packages.
    from tnp.bench.process import DeviceMissing

    timing, timed = comparison.policy(wanted.iters, wanted.warmup), False
    try:
        for index, problem in enumerate(problems):
            print("\n" * bool(index), end="")
            if len(problems) > 1:
                print(f"Problem {index + 1} of {len(problems)}")
            timed |= _shown(operator, problem, names, passes, timing)
    except DeviceMissing as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
    return 0 if timed else 1


def _parser(operator: Operator, sized: bool) -> Parser:
    """Returns the parser of an operator's command. `sized`: the sizes must be given."""
    about = (
        f"Times {operator.name} of {', '.join(operator.tensors)} at one size, with every installed "
        "implementation or with the named ones, and prints medians. Compares each result with "
        "float64 and with PyTorch's."
    )
    parser = Parser(prog=f"{PROGRAM} {operator.name}", description=about)
    asked.add_problem(parser, operator, required=sized)
    if suite := [dtype for dtype in FLOATS if operator.suite(dtype)]:
        names = ", ".join(operator.suite(suite[0]))
        about = f"time all of {names} in {', '.join(suite)}"
        parser.add_argument("--suite", action="store_true", help=about)
    parser.add_argument(
        "--implementations",
        nargs="+",
        metavar="NAME",
        help=f"of {', '.join(catalog().names(operator.name))}; torch, own, auto; by default all",
    )
    passes = parser.add_mutually_exclusive_group()
    passes.add_argument("--backward", action="store_true", help="time the backward pass alone")
    passes.add_argument("--both", action="store_true", help="time both passes")
    parser.add_argument("--iters", type=size, metavar="N", help="take exactly N samples of each")
    parser.add_argument(
        "--warmup", type=seconds, metavar="SECONDS", help="warm up at least so long (default 2)"
    )
    return parser


def _problems(operator: Operator, wanted: argparse.Namespace) -> list[Problem]:
    """Returns the problem that is asked for, or those of the suite, in one dtype if it is named."""
    named = asked.values(operator, wanted)
    if not getattr(wanted, "suite", False):
        return [asked.problem(operator, wanted.dtype, named)]
    if named:
        raise ValueError(f"--suite has its own sizes and options: leave out {', '.join(named)}")
    dtypes = [wanted.dtype] if wanted.dtype else FLOATS
    found = [one for dtype in dtypes for one in operator.suite(dtype).values()]
    if not found:
        raise ValueError(f"the suite has no {wanted.dtype}: leave out --dtype")
    return found


def _shown(
    operator: Operator,
    problem: Problem,
    names: Sequence[str],
    passes: Sequence[str],
    timing: Policy,
) -> bool:
    """Times a problem and prints its table. Returns whether anything was timed."""
    found = comparison.compare_at(operator, problem, names, passes, timing)
    print(f"{problem} on {found.device}\n")
    timed = any(row["status"] == "ok" for row in found.rows)
    if timed and found.device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        print("Triton's interpreter runs our kernels here: their times say nothing about a GPU\n")
    shown = lines(found)
    first = next(iter(found.times_ms), names[0])
    print(table([column.format(first) for column in COLUMNS], shown, NUMBERS))
    if timed:
        print(f"\n{LEGEND.format(first)}")
    if operator.backward_with_forward and "backward" in passes:
        print("\nbackward is timed with its forward")
    return timed


def lines(compared: Comparison) -> list[list[str]]:
    """Returns a line of the table for each implementation."""
    found = {(row["implementation"], row["pass"]): row for row in compared.rows}
    whole = compared.times_ms
    first = next(iter(whole.values()), None)
    sheet = devices.datasheet(compared.device)
    dtype = compared.problem.dtype
    text = []
    for name in compared.names:
        own = [found[name, pass_] for pass_ in compared.passes]
        timed = [row for row in own if row["status"] == "ok"]
        failed = list(dict.fromkeys(
            row["reason"] if row["status"] == "unsupported" else f"{row['status']}: {row['reason']}"
            for row in own if row["status"] != "ok"
        ))  # fmt: skip
        unsettled = list(dict.fromkeys(row["reason"] for row in timed if row["reason"]))
        text.append([
            name,
            own[0]["provider"] or "",
            *(_microseconds(found.get((name, pass_))) for pass_ in PASSES),
            _rate(timed[0]) if timed else "",
            _share(timed[0], dtype, sheet) if timed and sheet else "",
            f"{first / whole[name]:.2f}×" if name in whole else "",
            f"{max(row['max_abs_error'] for row in timed):.1e}" if timed else "",
            _close([row["difference"] for row in timed]),
            "; ".join(failed or unsettled),
        ])  # fmt: skip
    return text


def _close(differences: Sequence[float | None]) -> str:
    """Returns "yes" or "no" and the largest difference, or "" if one is unknown."""
    if not differences or None in differences:
        return ""
    close = all(difference <= CLOSE for difference in differences)  # never with NaN
    return f"{'yes' if close else 'no'}, {max(differences):.1e}"


def _microseconds(row: dict | None) -> str:
    return "" if row is None or row["status"] != "ok" else f"{1e3 * row['time_ms_p50']:.4g}"


def _rate(row: dict) -> str:
    """Returns TFLOP/s if operations are counted, else GB/s."""
    if row["tflops"]:
        return f"{row['tflops']:.4g} TFLOP/s"
    return f"{row['gb_per_s']:.4g} GB/s"


def _share(row: dict, dtype: str, sheet: Datasheet) -> str:
    """Returns the share of the datasheet's rate, or "" for operations in other formats."""
    if not row["tflops"]:
        return f"{row['gb_per_s'] * 1e9 / sheet.bytes_per_s:.0%}"
    if row["precision"] or ITEMSIZE[dtype] != 2:
        return ""
    return f"{row['tflops'] * 1e12 / sheet.flops_per_s:.0%}"


if __name__ == "__main__":
    end_with(main)
