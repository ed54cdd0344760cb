"""Times one problem of an operator with every installed implementation.

    python -m tnp.bench rope --help
    python -m tnp.bench swiglu --rows 16384 --width 14336 --both
    python -m tnp.bench swiglu --rows 64 --width 512 --dtype float32 --implementations torch triton

Each operator declares its sizes and options. The table has a row for each implementation: its
medians, or the reason why it did not run. After timing, results are compared with float64. All
implementations take turns in one process, on the first visible GPU or the CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tnp.dispatch import devices
from tnp.dispatch.devices import Datasheet
from tnp.dispatch.registry import catalog, is_automatic
from tnp.dispatch.spec import FLOATS, ITEMSIZE, Call, Case, Operator, Problem
from tnp.util.cli import Parser, end_with, option, size, table

PROGRAM = "python -m tnp.bench"
TIMEOUT_S = 900.0
COLUMNS = (
    "implementation", "provider", "forward µs", "backward µs", "rate", "of peak", "over {}",
    "max error", "",
)  # fmt: skip
LEGEND = (
    "over {}: its time divided by the row's, over all timed passes. max error: the largest "
    "absolute difference between an element of any result and float64. of peak: the rate as a "
    "share of the datasheet's, for operations in 16 bits or for memory"
)
NUMBERS = (2, 3, 4, 5, 6, 7)  # columns
# Options have the same names for every operator. Recorded rows keep some operators' own names.
SPELLED = {
    "heads": "n_heads",
    "kv_heads": "n_kv_heads",
    "n_queries": "n_q",
    "n_keys": "n_k",
    "page": "page_size",
}


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
    parser = _parser(operator)
    wanted = parser.parse_args(arguments[1:])
    names = wanted.implementations or catalog().names(operator.name)
    try:
        problem = _problem(operator, wanted)
        names = [
            name if is_automatic(name) else catalog().listed(operator.name, name).name
            for name in dict.fromkeys(names)
        ]
    except ValueError as error:
        parser.error(str(error))
    passes = ["forward"] * (not wanted.backward) + ["backward"] * (wanted.backward or wanted.both)
    if "backward" in passes and not operator.differentiated:
        parser.error(f"{operator.name} has no backward pass")
    return _measure(operator, problem, names, passes, wanted.iters)


def _parser(operator: Operator) -> Parser:
    """Returns the parser of an operator's command."""
    about = (
        f"Times {operator.name} of {', '.join(operator.tensors)} at one size, with every installed "
        "implementation or with the named ones, and prints medians. Compares each result with "
        "float64."
    )
    parser = Parser(prog=f"{PROGRAM} {operator.name}", description=about)
    for name in operator.sizes:
        spelled = option(SPELLED.get(name, name))
        parser.add_argument(
            spelled, dest=name, type=size, required=True, metavar="N", help="a size"
        )
    for name, kind in operator.options.items():
        named = {"help": "an option of the operator"}
        if kind is bool:
            parser.add_argument(option(name), action="store_true", **named)
        elif isinstance(kind, tuple):
            parser.add_argument(option(name), choices=kind, type=type(kind[0]), **named)
        else:
            parser.add_argument(option(name), type=kind, metavar=kind.__name__, **named)
    for name in operator.optional:
        help_text = f"with the tensor {name}"
        parser.add_argument(option(name), action="store_true", help=help_text)
    parser.add_argument("--dtype", choices=FLOATS, default=FLOATS[0], help="of the activations")
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
    return parser


def _problem(operator: Operator, wanted: argparse.Namespace) -> Problem:
    names = (*operator.sizes, *operator.options, *operator.optional)
    values = {name: getattr(wanted, name) for name in names}
    given = {name: value for name, value in values.items() if value is not None}
    problem = operator.problem(wanted.dtype, **given)
    _require_described(operator, problem)
    return problem


def _require_described(operator: Operator, problem: Problem) -> None:
    """Raises ValueError if the operator takes no tensors of these sizes."""
    import torch

    from tnp.ops._shared.random_values import Random

    case = Case(problem)
    drawn = operator.draw(case, Random(case, torch.device("meta")))
    inputs = [drawn.get(name) for name in operator.tensors]
    operator.describe(*inputs, **dict(operator.call_options(problem)))


def _measure(
    operator: Operator, problem: Problem, names: list[str], passes: list[str], iters: int | None
) -> int:
    from tnp.bench.isolate import run_isolated
    from tnp.bench.outcome import op_job
    from tnp.bench.policy import Policy
    from tnp.bench.process import DeviceMissing, device_lock
    from tnp.bench.provenance import device_slug

    timing = Policy()
    if iters is not None:
        timing = Policy(min_samples=iters, half_width=float("inf"), long_samples=iters)
    slug = device_slug()
    device = "cpu" if slug == "cpu" else "cuda"
    parameters = op_job(
        problem, names, problem.op, {}, device=device, device_slug=slug, replicate=0,
        timing=asdict(timing), passes=passes, shape="asked",
    )  # fmt: skip
    if device == "cpu" and (reasons := _refused(operator, problem, names, passes)):
        print(f"{problem} on {slug}\n")
        print(table(("implementation", ""), [*reasons.items()]))
        return 1
    try:
        with device_lock(slug):
            rows = run_isolated("op", parameters, TIMEOUT_S)["ops"]
    except DeviceMissing as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    print(f"{problem} on {slug}\n")
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        print("Triton's interpreter runs our kernels here: their times say nothing about a GPU\n")
    found = lines(rows, names, passes, devices.datasheet(slug))
    first = next((line[0] for line in found if line[6]), names[0])
    header = [column.format(first) for column in COLUMNS]
    print(table(header, found, NUMBERS))
    print(f"\n{LEGEND.format(first)}")
    if operator.backward_with_forward and "backward" in passes:
        print("\nbackward is timed with its forward")
    return 0 if any(row["status"] == "ok" for row in rows) else 1


def _refused(
    operator: Operator, problem: Problem, names: list[str], passes: list[str]
) -> dict[str, str]:
    """Returns why each implementation cannot run on this CPU; {} if any of them might."""
    from tnp.dispatch.selection import refuses
    from tnp.gates.results import wanted_of

    found = {}
    for name in names:
        own = None if is_automatic(name) else catalog().listed(operator.name, name).own
        if own is None:
            return {}
        wanted = wanted_of(operator, own, Case(problem)) if "backward" in passes else ()
        reason = refuses(own, Call(problem, devices.here_without_gpu(), wanted))
        if reason is None:
            return {}
        found[name] = reason
    return found


def lines(
    rows: list[dict[str, Any]], names: list[str], passes: list[str], sheet: Datasheet | None
) -> list[list[str]]:
    """Returns a line of the table for each implementation, in the order of `names`.

    Without the datasheet of the rows' GPU no line has a share of the peak.
    """
    found = {(row["implementation"], row["pass"]): row for row in rows}
    whole = {name: _whole([found[name, pass_] for pass_ in passes]) for name in names}
    first = next((name for name in names if whole[name] is not None), None)
    text = []
    for name in names:
        own = [found[name, pass_] for pass_ in passes]
        timed = [row for row in own if row["status"] == "ok"]
        failed = list(dict.fromkeys(
            row["reason"] if row["status"] == "unsupported" else f"{row['status']}: {row['reason']}"
            for row in own if row["status"] != "ok"
        ))  # fmt: skip
        unsettled = list(dict.fromkeys(row["reason"] for row in timed if row["reason"]))
        speedup = whole[name] and whole[first] / whole[name]
        text.append([
            name,
            own[0]["provider"] or "",
            *(_microseconds(found.get((name, pass_))) for pass_ in ("forward", "backward")),
            _rate(timed[0]) if timed else "",
            _share(timed[0], sheet) if timed and sheet else "",
            f"{speedup:.2f}×" if speedup else "",
            f"{max(row['max_abs_error'] for row in timed):.1e}" if timed else "",
            "; ".join(failed or unsettled),
        ])  # fmt: skip
    return text


def _whole(rows: list[dict]) -> float | None:
    """Returns the milliseconds of all passes, or None if a pass was not timed."""
    if any(row["status"] != "ok" for row in rows):
        return None
    return sum(row["time_ms_p50"] for row in rows)


def _microseconds(row: dict | None) -> str:
    return "" if row is None or row["status"] != "ok" else f"{1e3 * row['time_ms_p50']:.4g}"


def _rate(row: dict) -> str:
    """Returns TFLOP/s if operations are counted, else GB/s."""
    if row["tflops"]:
        return f"{row['tflops']:.4g} TFLOP/s"
    return f"{row['gb_per_s']:.4g} GB/s"


def _share(row: dict, sheet: Datasheet) -> str:
    """Returns the share of the datasheet's rate, or "" for operations in other formats."""
    if not row["tflops"]:
        return f"{row['gb_per_s'] * 1e9 / sheet.bytes_per_s:.0%}"
    if row["precision"] or ITEMSIZE[row["dtype"]] != 2:
        return ""
    return f"{row['tflops'] * 1e12 / sheet.flops_per_s:.0%}"


if __name__ == "__main__":
    end_with(main)
