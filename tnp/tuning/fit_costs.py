"""Measures what kernels cost on your own GPU, so that "auto" can predict times of other sizes.

    python -m tnp.tuning.fit_costs

A kernel counts the parts of its time (`tnp.dispatch.spec.Kernel.counts`): a launch, blocks of keys
on the busiest multiprocessor, tiles of queries. This command times every such kernel and
configuration at random sizes, in about ten minutes. It fits the time of each part by least squares,
and enters it in your own table. The table lies in your cache and is read before the installed one.
TNP_TABLES names another folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from itertools import product

import numpy

from tnp.dispatch import tuned_tables
from tnp.dispatch.registry import catalog
from tnp.dispatch.spec import FLOATS, Operator
from tnp.util.cli import Parser, end_with, option, table

TIMEOUT_S = 1800.0
N_SIZES, SEED = 200, 1
# A configuration needs this many times for each count of its kernel.
TIMES_A_COUNT = 4
HEADER = ("operation", "kernel", "configuration", "µs of each count", "off by", "sizes")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns exit code 0, 1 if an operator could not be timed, 2 without a GPU."""
    parser = Parser(prog="python -m tnp.tuning.fit_costs", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument(option("dtype"), choices=FLOATS, default=FLOATS[0], help="of all tensors")
    dtype = parser.parse_args(arguments).dtype
    # Behind --help, which needs no package of an extra.
    from tnp.bench.child import require_gpu
    from tnp.bench.process import DeviceMissing, device_lock, run_child

    try:
        target = require_gpu()
    except DeviceMissing as error:
        print(f"python -m tnp.tuning.fit_costs needs an NVIDIA GPU: {error}", file=sys.stderr)
        return 2
    without = []
    for operator in catalog().operators.values():
        if operator.random_problem is None:
            continue
        print(f"timing {operator.name} at {N_SIZES} sizes …", file=sys.stderr)
        asked = {"op": operator.name, "dtype": dtype, "n_sizes": N_SIZES, "seed": SEED}
        asked |= {"device": "cuda", "device_slug": target.model}
        with device_lock(target.model):
            report = run_child(["tnp.bench.child", "costs"], asked, TIMEOUT_S)
        found = fitted(operator, report.get("timed", []))
        if not found:
            few = "too few sizes were timed of each kernel"
            without.append(f"{operator.name}: {few if 'timed' in report else report['failure'][1]}")
            continue
        print(table(HEADER, [line for _, line in found], right=(4, 5)))
        path = tuned_tables.write(target, [entry for entry, _ in found])
        print(f"{len(found)} entries for {target.model}: {path}")
    for reason in without:
        print(f"nothing could be fitted of {reason}", file=sys.stderr)
    return 1 if without else 0


def fitted(
    operator: Operator, rows: Iterable[dict]
) -> list[tuple[tuned_tables.Entry, tuple[str, ...]]]:
    """Returns the entry of each kernel and configuration, and its line of the printed table.

    The fit minimizes squared relative errors, so a short launch counts as much as a long one. An
    error is multiplied by (time of the size's fastest / own time)²: a configuration far from the
    fastest is not chosen anyway. "off by" counts all errors alike. A configuration has no entry if
    it was timed at too few sizes, or if one of its counts was always 0.

    Args:
        operator: the operator of these operations.
        rows: rows of `tnp.bench.costs.measure_costs`.
    """
    by_config: dict[tuple[str, str, str], list[dict]] = {}
    fastest: dict[tuple[str, str], float] = {}
    for row in rows:
        key = row["of"], row["choice"], json.dumps(row["config"])
        by_config.setdefault(key, []).append(row)
        size = row["of"], row["problem"]
        fastest[size] = min(row["us"], fastest.get(size, row["us"]))
    found = []
    for (of, kernel, _), own in by_config.items():
        counts = numpy.array([row["counts"] for row in own], dtype=float)
        if len(own) < TIMES_A_COUNT * counts.shape[1]:
            continue
        times = numpy.array([row["us"] for row in own])
        relative = counts / times[:, None]
        if numpy.linalg.matrix_rank(relative) < counts.shape[1]:
            continue  # a count that is always 0 would seem to take no time
        near = numpy.array([fastest[row["of"], row["problem"]] for row in own]) / times
        us = _not_negative(relative, near**2)
        off = numpy.sqrt(numpy.mean((relative @ us - 1) ** 2))
        rounded = [round(float(one), 4) for one in us]
        problem, config = operator.from_json(own[0]["problem"]), own[0]["config"]
        entry = tuned_tables.cost_entry(of, operator, problem, kernel, config, rounded)
        shown = ", ".join(map(str, config.values()))
        line = of, kernel, shown, "  ".join(f"{one:.3g}" for one in rounded)
        found.append((entry, (*line, f"{off:.0%}", str(len(own)))))
    return found


def _not_negative(relative: numpy.ndarray, weights: numpy.ndarray) -> numpy.ndarray:
    """Returns the non-negative times that bring every row closest to 1, by weighted least squares.

    Without that bound, two counts that nearly always go together could get a positive and a
    negative time. The launch, which is the first count, is never left out.
    """
    weighted = relative * weights[:, None]
    best, least = numpy.zeros(relative.shape[1]), numpy.inf
    for others in product((True, False), repeat=relative.shape[1] - 1):
        kept = numpy.flatnonzero((True, *others))
        found = numpy.linalg.lstsq(weighted[:, kept], weights, rcond=None)[0]
        error = numpy.linalg.norm(weighted[:, kept] @ found - weights)
        if found.min() >= 0 and error < least:
            best, least = numpy.zeros(relative.shape[1]), error
            best[kept] = found
    return best


if __name__ == "__main__":
    end_with(main)
