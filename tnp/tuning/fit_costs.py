"""What kernels cost on your own GPU, so that "auto" can predict their times where nobody timed.

    python -m tnp.tuning.fit_costs

A kernel says what its time is made of (`tnp.dispatch.spec.Kernel.counts`): a launch, blocks of keys
that the busiest multiprocessor goes through, tiles of queries. This times every kernel and
configuration that does, at sizes drawn at random, in some ten minutes. It fits by least squares
what each count takes on this GPU, and enters that in a table of your own. The table lies in your
cache and comes before the one that is installed; TNP_TABLES names another folder.
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
# Times of a configuration that are needed for every count of its kernel.
TIMES_A_COUNT = 4
HEADER = ("operation", "kernel", "configuration", "µs of each count", "off by", "sizes")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 where an operator could not be timed; 2 without a GPU."""
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
        if operator.drawn is None:
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
    """The entry of each kernel and configuration, and its line of the table.

    Least squares of relative errors: a short launch counts as much as a long one. The errors of a
    configuration are multiplied by (time of the size's fastest / its own)², since where it is far
    from the fastest it is not chosen, however wrong its prediction; "off by" counts all errors
    alike. A configuration that was timed at too few sizes, or at none with one of its counts, has
    no entry.

    Args:
        operator: whose operations these are.
        rows: of `tnp.bench.costs.measure_costs`.
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
            continue  # what was never counted would seem to take no time
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
    """What best makes every row 1, nowhere below 0; the launch, counted first, is never left out.

    Counts that nearly always go together would else share a time as a gain and a loss, which at
    other sizes is a negative time. A row's error is multiplied by its weight.
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
