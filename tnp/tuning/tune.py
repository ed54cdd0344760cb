"""Chooses what "auto" runs at sizes of your own, on your own GPU.

    python -m tnp.tuning --batch 8 --n-context 2000 --n-target 300

For every operator of the neural process, it times all implementations that "auto" may choose,
forward and backward, each in its own process. It enters the fastest for training and for inference
in your own table. The table lies in your cache and is read before the installed one. Only calls of
these sizes use the entries.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from tnp.bench.policy import Policy
from tnp.bench.sizes import in_step
from tnp.dispatch import tuned_tables
from tnp.dispatch.registry import AUTO, catalog
from tnp.dispatch.spec import FLOATS, Operator
from tnp.model.variants import storage_width
from tnp.tuning import entries as tuning
from tnp.util.cli import Parser, option, size, table

TIMEOUT_S = 900.0
OF_MODEL = ("d_model", "n_heads", "d_ff", "n_components")
HEADER = ("operator", "implementation", "forward ms", "backward ms", "")
PASSES = ("forward", "backward")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns exit code 0, 1 if an operator could not be timed at all, 2 without a GPU."""
    wanted = _parser().parse_args(arguments)
    # Behind --help, which needs no package of an extra.
    from tnp.bench.child import require_gpu
    from tnp.bench.isolate import run_isolated
    from tnp.bench.process import DeviceMissing, device_lock

    try:
        target = require_gpu()
    except DeviceMissing as error:
        print(f"python -m tnp.tuning needs an NVIDIA GPU: {error}", file=sys.stderr)
        return 2
    entries, answers, without = [], [], []
    for operator, parameters in _jobs(wanted, target.model):
        print(f"timing {operator.name} …", file=sys.stderr)
        with device_lock(target.model):
            rows = run_isolated("op", parameters, TIMEOUT_S)["ops"]
        chosen = tuning.of_operators(rows)
        answers += _answers(operator, parameters, rows, chosen)
        entries += chosen
        without += [] if chosen else [operator.name]
    print(table(HEADER, answers, right=(2, 3)))
    if entries:
        path = tuned_tables.write(target, entries)
        print(f"{len(entries)} entries for {target.model}: {path}")
    if without:
        print(f"nothing could be timed of {', '.join(without)}", file=sys.stderr)
    return 1 if without else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m tnp.tuning", description="Chooses what 'auto' runs at these sizes."
    )
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
    return parser


def _jobs(wanted: argparse.Namespace, device: str) -> Iterator[tuple[Operator, dict]]:
    """Yields a benchmark for each operator of a step, of all that "auto" may choose."""
    from tnp.bench.outcome import op_job
    from tnp.model.config import TNPConfig

    default = TNPConfig()
    model = {name: getattr(wanted, name) or getattr(default, name) for name in OF_MODEL}
    model |= {"n_layers": default.n_layers}
    model |= {"d_ff_storage": wanted.d_ff_storage or storage_width(model["d_ff"])}
    for operator in catalog().operators.values():
        found = in_step(operator, model, vars(wanted))
        if found is not None:
            problem, draw = found
            contenders = catalog().candidates(operator.name, AUTO)
            config_id = f"tune--{operator.name}"
            yield operator, op_job(
                problem, contenders, config_id, draw, device="cuda", device_slug=device,
                replicate=0, timing=asdict(Policy()), shape="tune",
            )  # fmt: skip


def _answers(
    operator: Operator, parameters: dict, rows: Sequence[dict], chosen: Sequence[tuned_tables.Entry]
) -> Iterator[tuple[str, ...]]:
    """Yields a line for each implementation: times and modes, or why it was not timed."""
    for name in parameters["implementations"]:
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
