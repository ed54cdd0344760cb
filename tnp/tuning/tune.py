"""Chooses what "auto" runs at sizes of your own, on your own GPU.

    python -m tnp.tuning --batch 8 --n-context 2000 --n-target 300
    python -m tnp.tuning rms_norm --rows 16384 --width 768

Without an operator, it tunes every operator of a training step of the neural process. With one, it
tunes that operator at one size: it first times each kernel of ours with every configuration.

It times all implementations that "auto" may choose, forward and backward, each operator in its own
process. It enters the fastest for training and for inference in your own table. The table lies in
your cache and is read before the installed one. Only calls of these sizes use the entries.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from tnp.bench import asked
from tnp.bench.policy import TIMEOUT_S, Policy
from tnp.bench.sizes import in_step
from tnp.dispatch import tuned_tables
from tnp.dispatch.devices import Target
from tnp.dispatch.registry import AUTO, catalog
from tnp.dispatch.spec import FLOATS, PASSES, Operator, Problem
from tnp.model.variants import storage_width
from tnp.tuning import entries as tuning
from tnp.util.cli import Parser, option, size, table

PROGRAM = "python -m tnp.tuning"
OF_MODEL = ("d_model", "n_heads", "d_ff", "n_components")
HEADER = ("operator", "implementation", "forward ms", "backward ms", "")

Drawn = tuple[Operator, Problem, dict]  # how the problem's values are drawn


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns exit code 0, 1 if an operator could not be timed at all, 2 without a GPU."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    alone = bool(arguments) and not arguments[0].startswith("-")
    problems = list(_of_operator(*arguments) if alone else _of_step(arguments))
    # Behind --help, which needs no package of an extra.
    from tnp.bench.child import require_gpu
    from tnp.bench.process import DeviceMissing

    try:
        target = require_gpu()
    except DeviceMissing as error:
        print(f"{PROGRAM} needs an NVIDIA GPU: {error}", file=sys.stderr)
        return 2
    answers, found, without = [], [], []
    for operator, problem, draw in problems:
        if alone and (kernels := _fastest_kernels(operator, problem, target)):
            tuned_tables.write(target, kernels)  # the implementations below run with them
            found += kernels
        names = catalog().candidates(operator.name, AUTO)
        rows = _timed(operator, problem, names, target, draw)
        chosen = tuning.of_operators(rows)
        answers += _answers(operator, names, rows, chosen)
        found += chosen
        without += [] if chosen else [operator.name]
    print(table(HEADER, answers, right=(2, 3)))
    if found:
        path = tuned_tables.write(target, found)
        print(f"{len(found)} entries for {target.model}: {path}")
    if without:
        print(f"nothing could be timed of {', '.join(without)}", file=sys.stderr)
    return 1 if without else 0


def _of_step(arguments: Sequence[str]) -> Iterator[Drawn]:
    """Yields the problem of each operator of a training step."""
    from tnp.model.config import TNPConfig

    parser = Parser(prog=PROGRAM, description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    for name in ("batch", "n_context", "n_target"):
        parser.add_argument(option(name), type=size, required=True)
    for name in OF_MODEL:
        parser.add_argument(option(name), type=size, help="by default the model's own")
    parser.add_argument(
        "--d-ff-storage",
        type=size,
        help="stored width of hidden layers; by default that of named variants",
    )
    parser.add_argument("--dtype", choices=FLOATS, default=FLOATS[0])
    wanted = parser.parse_args(arguments)
    default = TNPConfig()
    model = {name: getattr(wanted, name) or getattr(default, name) for name in OF_MODEL}
    model |= {"n_layers": default.n_layers}
    model |= {"d_ff_storage": wanted.d_ff_storage or storage_width(model["d_ff"])}
    for operator in catalog().operators.values():
        found = in_step(operator, model, vars(wanted))
        if found is not None:
            yield operator, *found


def _of_operator(name: str, *arguments: str) -> Iterator[Drawn]:
    """Yields the one problem of an operator that is named."""
    try:
        operator = catalog().operator(name)
    except ValueError as error:
        Parser(prog=PROGRAM).error(str(error))
    about = f"Chooses what 'auto' runs for {name} at one size."
    parser = Parser(prog=f"{PROGRAM} {name}", description=about)
    asked.add_problem(parser, operator)
    wanted = parser.parse_args(arguments)
    try:
        problem = asked.problem(operator, wanted.dtype, asked.values(operator, wanted))
    except ValueError as error:
        parser.error(str(error))
    yield operator, problem, {}


def _fastest_kernels(
    operator: Operator, problem: Problem, target: Target
) -> list[tuned_tables.Entry]:
    """Times the kernels of each operation of ours, with every configuration."""
    rows = []
    # An operation that several implementations share is tuned once.
    for name, pass_ in tuned_tables.operations(operator).values():
        trials = {"forced": {name: {}}, "passes": [pass_]}
        rows += _timed(operator, problem, [name], target, {}, **trials)
    return tuning.of_operations(rows)


def _timed(
    operator: Operator,
    problem: Problem,
    names: Sequence[str],
    target: Target,
    draw: dict,
    **others: object,
) -> list[dict]:
    """Returns the rows of one job of `tnp.bench.outcome.op_job`."""
    from tnp.bench.isolate import run_isolated
    from tnp.bench.outcome import op_job
    from tnp.bench.process import device_lock

    kernels = " kernels" if "forced" in others else ""
    print(f"timing {operator.name}{kernels} …", file=sys.stderr)
    job = op_job(
        problem, names, f"tune--{operator.name}", draw, device="cuda", device_slug=target.model,
        replicate=0, timing=asdict(Policy()), shape="tune", **others,
    )  # fmt: skip
    with device_lock(target.model):
        return run_isolated("op", job, TIMEOUT_S)["ops"]


def _answers(
    operator: Operator,
    names: Sequence[str],
    rows: Sequence[dict],
    chosen: Sequence[tuned_tables.Entry],
) -> Iterator[tuple[str, ...]]:
    """Yields a line for each implementation: times and modes, or why it was not timed."""
    for name in names:
        own = {row["pass"]: row for row in rows if row["implementation"] == name}
        times = [
            f"{own[pass_]['time_ms_p50']:.4g}" if own[pass_]["status"] == "ok" else ""
            for pass_ in PASSES
            if pass_ in own
        ]
        failed = {f"{row['status']}: {row['reason']}": None for row in own.values()
                  if row["status"] != "ok"}  # fmt: skip
        modes = [entry["mode"] for entry in chosen if entry["choice"] == name]
        notes = [f"chosen for {' and '.join(modes)}"] * bool(modes) + list(failed)
        yield operator.name, name, *(times + ["", ""])[:2], "; ".join(notes)
