"""What runs on a GPU, here or on one that is not here, and why the rest does not.

    python -m tnp.device
    python -m tnp.device --gpu "NVIDIA A100"
    python -m tnp.device --capability 75

For each operator and implementation the answer is of one problem: the first that the GPU's tuned
table has of the operator, or else the first that its gate has. Implementations of other packages
are asked only under --load, which imports them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import suppress

from tnp.catalog import Listed, catalog
from tnp.commands import Parser, end_with, table
from tnp.contract import Call, Case, Operator, Problem
from tnp.extras import MissingExtra
from tnp.targets import Target

HEADER = ("operator", "implementation", "provider", "runs", "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0; 2 for arguments that are wrong."""
    parser = Parser(prog="python -m tnp.device", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--capability", type=capability, metavar="75", help="compute capability 7.5")
    which.add_argument("--gpu", metavar="NAME", help="a GPU by its product name")
    parser.add_argument("--load", action="store_true", help="import other packages' and ask them")
    wanted = parser.parse_args(arguments)
    from tnp import targets

    try:
        if wanted.capability:
            target = targets.of_capability(wanted.capability)
        else:
            target = targets.named(wanted.gpu) if wanted.gpu else _here()
    except ValueError as error:
        parser.error(str(error))
    print("\n".join(about(target, wanted.gpu or target.model)) + "\n")
    operators = catalog().operators.values()
    rows = [row for operator in operators for row in answers(operator, target, wanted.load)]
    print(table(HEADER, rows))
    for fault in catalog().faults:
        print(f"\n{fault}")
    return 0


def capability(text: str) -> int:
    """A compute capability without its point, of an option."""
    # No GPU older than 2.0 runs PyTorch: "10" is meant for 10.0.
    if not (text.isdigit() and len(text) in (2, 3) and int(text) >= 20):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be as 75 for compute capability 7.5, or as 100 for 10.0"
        )
    return int(text)


def _here() -> Target:
    import torch

    from tnp import targets

    if torch.cuda.is_available():
        return targets.of_device(torch.device("cuda", torch.cuda.current_device()))
    with suppress(MissingExtra):  # only NVML knows of a GPU that PyTorch cannot use
        from tnp.bench.provenance import device_slug

        if (slug := device_slug()) != "cpu":
            raise ValueError(f"{slug} is here, but PyTorch {torch.__version__} cannot use it")
    return targets.here_without_gpu()


def about(target: Target, name: str) -> Iterator[str]:
    """A GPU in lines."""
    from tnp import targets

    if target.kind != "cuda":
        yield {"cpu": "no NVIDIA GPU: a CPU", "interpreter": "Triton's interpreter"}[target.kind]
        return
    sheet = targets.datasheet(name) if name else None
    yield f"{name or 'a GPU'}, compute capability {target.capability / 10}"
    yield f"{target.shared_bytes // 1024} KB of shared memory for a block"
    if name:
        yield f"{target.multiprocessors} multiprocessors"
    if sheet:
        yield (
            f"by its datasheet {sheet.flops_per_s / 1e12:.4g} TFLOP/s of dense 16-bit products, "
            f"{sheet.bytes_per_s / 1e12:.4g} TB/s of device memory"
        )


def answers(operator: Operator, target: Target, load: bool = False) -> Iterator[tuple[str, ...]]:
    """A row of the table for each implementation of an operator."""
    problem = first_problem(operator, target)
    for name in catalog().names(operator.name):
        listed = catalog().listed(operator.name, name)
        runs, note = _answer(operator, listed, problem, target, load)
        yield operator.name, name, listed.provider, runs, note


def first_problem(operator: Operator, target: Target) -> Problem | None:
    """Of the tuned table, or of the operator's gate; None where neither has one."""
    import json

    from tnp import choice

    for entry in choice.of_target(target):
        if entry["of"] == operator.name:
            try:
                return operator.from_json(json.dumps(entry["problem"]))
            except ValueError:  # the operator has changed since
                continue
    return next((case.problem for case in operator.cases(target)), None)


def _answer(
    operator: Operator, listed: Listed, problem: Problem | None, target: Target, load: bool
) -> tuple[str, str]:
    """ "yes", "no" or "?", and why or with what."""
    from tnp.gates.results import wanted_of

    if problem is None:
        return "?", "the operator has no problem for this device"
    if listed.missing:
        return "no", listed.missing
    if listed.entry is not None and not load:
        return "?", "installed; --load asks it"
    try:
        found = listed.implementation
    except Exception as error:  # whatever importing it raises is the answer
        return "no", " ".join(f"{type(error).__name__}: {error}".split())
    wanted = wanted_of(operator, found, Case(problem))
    call = Call(problem, target, wanted)
    reason = found.refuses(call)
    if reason is not None:
        return "no", reason
    kernels = []
    for operation in (found.forward, found.backward if wanted else None):
        if operation is not None:
            from tnp.selection import kernels_of

            here = kernels_of(operation).values()
            refused = {kernel.name: kernel.refuses(call) for kernel in here}
            able = [kernel for kernel, why in refused.items() if why is None]
            if not able:
                return "no", f"{operation.name}: {next(iter(refused.values()))}"
            kernels.append(f"{operation.name.rpartition('.')[2]} {' or '.join(able)}")
    if not kernels and not wanted and operator.differentiated:
        kernels.append("forward only")
    return "yes", ", ".join(kernels)


if __name__ == "__main__":
    end_with(main)
