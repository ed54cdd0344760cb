"""What runs on a GPU, here or on one that is not here, and why the rest does not.

    python -m tnp.tuning.device
    python -m tnp.tuning.device --gpu "NVIDIA A100"
    python -m tnp.tuning.device --capability 7.5

For each operator and implementation the answer is of one problem: the first that the GPU's tuned
table has of the operator, or else the first that its gate has. Column "auto" stands where "auto"
takes the implementation, and says by what. Implementations of other packages are asked only under
--load, which imports them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from tnp.dispatch.devices import Target
from tnp.dispatch.registry import AUTO, Listed, catalog
from tnp.dispatch.spec import Call, Case, Operator, Problem
from tnp.dispatch.tuned_tables import Choice
from tnp.util.cli import Parser, end_with, table
from tnp.util.extras import MissingExtra

HEADER = ("operator", "implementation", "provider", "runs", AUTO, "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0; 2 for arguments that are wrong."""
    parser = Parser(prog="python -m tnp.tuning.device", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--capability", type=capability, metavar="7.5",
                       help="a GPU of which only the compute capability is known")  # fmt: skip
    which.add_argument("--gpu", metavar="NAME", help="a GPU by its product name")
    parser.add_argument("--load", action="store_true", help="import other packages' and ask them")
    wanted = parser.parse_args(arguments)
    from tnp.dispatch import devices

    try:
        if wanted.capability:
            target = devices.of_capability(wanted.capability)
        else:
            target = _named(wanted.gpu) if wanted.gpu else _here()
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
    """A compute capability of an option, "8.6" or "86", as 86."""
    from tnp.dispatch import devices

    known = {form: one for one in devices.CAPABILITIES for form in (str(one), str(one / 10))}
    if text not in known:
        choices = ", ".join(str(one / 10) for one in devices.CAPABILITIES)
        raise argparse.ArgumentTypeError(
            f"{text!r} is no compute capability of a GPU: choose from {choices}"
        )
    return known[text]


def _named(gpu: str) -> Target:
    from tnp.dispatch import devices

    try:
        return devices.named(gpu)
    except ValueError as error:
        raise ValueError(
            f"{error}, or name its compute capability, such as --capability 8.6"
        ) from None


def _here() -> Target:
    import torch

    from tnp.dispatch import devices

    if torch.cuda.is_available():
        return devices.of_device(torch.device("cuda", torch.cuda.current_device()))
    with suppress(MissingExtra):  # only NVML knows of a GPU that PyTorch cannot use
        from tnp.bench.provenance import device_slug

        if (slug := device_slug()) != "cpu":
            raise ValueError(f"{slug} is here, but PyTorch {torch.__version__} cannot use it")
    return devices.here_without_gpu()


def about(target: Target, name: str) -> Iterator[str]:
    """A GPU in lines, and what "auto" does there."""
    from tnp.dispatch import devices, tuned_tables

    if target.kind != "cuda":
        yield {"cpu": "no NVIDIA GPU: a CPU", "interpreter": "Triton's interpreter"}[target.kind]
        yield '"auto" takes PyTorch\'s operators here: ours are written for GPUs'
        return
    sheet = devices.datasheet(name) if name else None
    yield f"{name or 'a GPU'}, compute capability {target.capability / 10}"
    yield f"{target.shared_bytes // 1024} KB of shared memory for a block"
    if name:
        yield f"{target.multiprocessors} multiprocessors"
    if sheet:
        yield (
            f"by its datasheet {sheet.flops_per_s / 1e12:.4g} TFLOP/s of dense 16-bit products, "
            f"{sheet.bytes_per_s / 1e12:.4g} TB/s of device memory"
        )
    if not tuned_tables.of_target(target):
        yield _by_default(target)


def _by_default(target: Target) -> str:
    """What "auto" takes of a GPU of whose capability no table says anything, and why."""
    from tnp.dispatch import tuned_tables

    if target.capability in tuned_tables.OURS_ON:
        return 'nothing was measured on such a GPU: "auto" takes ours where they run'
    return (
        'nothing was measured on such a GPU: "auto" takes PyTorch\'s operators, where one says '
        "yes; attention below 8.0 runs as 'reference' alone, which must be named. Ours run where "
        "the table says yes and they are named; python -m tnp.tuning times them on the GPU, and "
        '"auto" then takes the fastest'
    )


def answers(operator: Operator, target: Target, load: bool = False) -> Iterator[tuple[str, ...]]:
    """A row of the table for each implementation of an operator."""
    problem = first_problem(operator, target)
    chosen = problem and _chosen(operator, problem, target)
    for name in catalog().names(operator.name):
        listed = catalog().listed(operator.name, name)
        runs, note = _answer(operator, listed, problem, target, load)
        by = chosen.source if chosen and chosen.name == name else ""
        yield operator.name, name, listed.provider, runs, by, note


def _chosen(operator: Operator, problem: Problem, target: Target) -> Choice | None:
    """What "auto" takes for a problem, with the gradients that PyTorch's form gives."""
    from tnp.dispatch.selection import choose_implementation
    from tnp.gates.results import wanted_of

    plain = operator.implementations[0]
    call = Call(problem, target, wanted_of(operator, plain, Case(problem)))
    with suppress(RuntimeError):  # nothing takes it, as the rows say
        return choose_implementation(operator, AUTO, call)[0]
    return None


def first_problem(operator: Operator, target: Target) -> Problem | None:
    """Of the tuned table, or of the operator's gate; None where neither has one."""
    import json

    from tnp.dispatch import tuned_tables

    for entry in tuned_tables.of_target(target):
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
    if problem.dtype not in found.dtypes:  # of one it takes: the dtype is the problem's own
        problem = replace(problem, dtype=found.dtypes[0])
    wanted = wanted_of(operator, found, Case(problem))
    call = Call(problem, target, wanted)
    reason = found.refuses(call)
    if reason is not None:
        return "no", reason
    kernels = []
    for operation in (found.forward, found.backward if wanted else None):
        if operation is not None:
            from tnp.dispatch.selection import kernels_of

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
