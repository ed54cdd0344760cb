"""Says which implementations run on a GPU, also on one that is not here, and why others do not.

    python -m tnp.tuning.device
    python -m tnp.tuning.device --gpu "NVIDIA A100"
    python -m tnp.tuning.device --capability 7.5
    python -m tnp.tuning.device --capability sm_86

Each answer is for one problem: the first in the GPU's tuned table, or else the first case of the
operator's gate, in a dtype that the implementation takes. In column "runs" a "?" was not asked.
Column "auto" says why "auto" chooses an implementation, and is empty for the others. Column "tiles"
has the blocks of the kernels that would run, and is empty for kernels whose configuration has no
blocks. The last column says why one does not run. --load imports implementations of other packages
and asks them too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from tnp.dispatch.devices import Target
from tnp.dispatch.registry import AUTO, Listed, catalog
from tnp.dispatch.spec import Call, Case, Implementation, Operator, Problem
from tnp.dispatch.tuned_tables import Choice, as_json
from tnp.util.cli import Parser, end_with, table
from tnp.util.extras import MissingExtra

OLDEST = 80  # the compute capability from which on Triton kernels run
SPECIFIC = 90  # the compute capability from which on architectures have a form such as sm_90a
HEADER = ("operator", "implementation", "provider", "runs", AUTO, "tiles", "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table. Returns exit code 0, or 2 for wrong arguments."""
    parser = Parser(prog="python -m tnp.tuning.device", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--capability", type=capability, metavar="8.6",
                       help="a compute capability or architecture, as 8.6 or sm_86")  # fmt: skip
    which.add_argument("--gpu", metavar="NAME", help="a GPU by its product name")
    parser.add_argument("--load", action="store_true", help="import other packages' and ask them")
    given = parser.parse_args(arguments)
    from tnp.dispatch import devices

    try:
        if given.capability:
            target = devices.of_capability(given.capability)
        else:
            target = _named(given.gpu) if given.gpu else _here()
        operators = catalog().operators.values()
        rows = [row for operator in operators for row in answers(operator, target, given.load)]
    except ValueError as error:
        parser.error(str(error))
    print("\n".join(about(target, given.gpu or target.model)) + "\n")
    print(table(HEADER, rows))
    for fault in catalog().faults:
        print(f"\n{fault}")
    return 0


def capability(text: str) -> int:
    """Returns a compute capability as a number: 86 for "8.6", "86" or "sm_86", 90 for "sm_90a"."""
    from tnp.dispatch import devices

    known = {
        form: one
        for one in devices.CAPABILITIES
        for form in (str(one), str(one / 10), f"sm_{one}", *[f"sm_{one}a"] * (one >= SPECIFIC))
    }
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
    """Yields lines about a device, and about the choices of "auto" there."""
    from tnp.dispatch import devices, tuned_tables
    from tnp.dispatch.devices import FEATURES

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
    has = (f"{name} {_yes(target.capability >= least)}" for name, least in FEATURES.items())
    yield ", ".join(has)
    if not tuned_tables.of_target(target):
        yield _by_default(target)


def _yes(true: bool) -> str:
    return "yes" if true else "no"


def _by_default(target: Target) -> str:
    """Says what "auto" chooses on a GPU without a table for its capability, and why."""
    from tnp.dispatch import tuned_tables

    if target.capability in tuned_tables.OURS_ON:
        return 'nothing was measured on such a GPU: "auto" takes ours where they run'
    measured = 'nothing was measured on such a GPU: "auto" takes PyTorch\'s operators, if they run'
    if target.capability < OLDEST:
        return (
            f"{measured}. Our Triton kernels need {OLDEST / 10}. Attention 'reference' and "
            "the CUDA C++ kernels of ./lab run if they are named"
        )
    return (
        f"{measured}. Ours run by name where the table says yes. python -m tnp.tuning times them "
        'on the GPU; "auto" then takes the fastest'
    )


def answers(operator: Operator, target: Target, load: bool = False) -> Iterator[tuple[str, ...]]:
    """Yields a row of the table for each implementation of an operator."""
    problem = first_problem(operator, target)
    chosen = problem and _chosen(operator, problem, target)
    for name in catalog().names(operator.name):
        listed = catalog().listed(operator.name, name)
        runs, tiles, note = _answer(operator, listed, problem, target, load)
        by = chosen.source if chosen and chosen.name == name else ""
        yield operator.name, name, listed.provider, runs, by, tiles, note


def _chosen(operator: Operator, problem: Problem, target: Target) -> Choice | None:
    """Returns the choice of "auto" for a problem, with the gradients that PyTorch's form gives."""
    from tnp.dispatch.selection import choose_implementation
    from tnp.gates.results import wanted_of

    plain = operator.implementations[0]
    call = Call(problem, target, wanted_of(operator, plain, Case(problem)))
    with suppress(RuntimeError):  # nothing takes it, as the rows say
        return choose_implementation(operator, AUTO, call)[0]
    return None


def first_problem(operator: Operator, target: Target) -> Problem | None:
    """Returns the first problem of the tuned table, or of the operator's gate, or None."""
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
) -> tuple[str, str, str]:
    """Returns "yes", "no" or "?"; the tiles of its kernels; and the reason or the kernels."""
    from tnp.gates.results import wanted_of

    if problem is None:
        return "?", "", "the operator has no problem for this device"
    if listed.missing:
        return "no", "", listed.missing
    if listed.entry is not None and not load:
        return "?", "", "installed; --load asks it"
    try:
        found = listed.implementation
    except Exception as error:  # a failed import is the answer
        return "no", "", " ".join(f"{type(error).__name__}: {error}".split())
    if problem.dtype not in found.dtypes:  # asked with a dtype that it takes
        problem = replace(problem, dtype=found.dtypes[0])
    wanted = wanted_of(operator, found, Case(problem))
    call = Call(problem, target, wanted)
    reason = found.refuses(call)
    if reason is not None:
        return "no", "", reason
    if found.forward is None:
        return "yes", "", "" if wanted or not operator.differentiated else "forward only"
    return _by_kernels(operator, found, call)


def _by_kernels(operator: Operator, found: Implementation, call: Call) -> tuple[str, str, str]:
    """Returns the answer for an implementation of kernels that does not refuse the call."""
    from tnp.dispatch.selection import choose_kernel, kernels_of
    from tnp.gates.launches import compiled_for

    kernels, tiles, saves = [], [], None
    for operation in (found.forward, found.backward if call.wanted else None):
        if operation is None:
            continue
        refused = {kernel: kernel.refuses(call) for kernel in kernels_of(operation).values()}
        able = [kernel for kernel, reason in refused.items() if reason is None]
        if not able:
            return "no", "", f"{operation.name}: {next(iter(refused.values()))}"
        capability = call.target.capability
        tried = any(capability in compiled_for(kernel) for kernel in able)
        if call.target.kind == "cuda" and not tried:
            return "?", "", f"no gate compiles {operation.name} for {capability / 10}"
        short = operation.name.rpartition(".")[2]
        kernels.append(f"{short} {' or '.join(kernel.name for kernel in able)}")
        kernel, choice = choose_kernel(operation, operator, call, saves)
        saves = kernel.saves
        if blocks := _blocks(choice.config):
            tiles.append(f"{short} {blocks}")
    return "yes", ", ".join(tiles), ", ".join(kernels)


def _blocks(config: object) -> str:
    """Returns the sizes of a configuration's tiles, "128×64" or "64×32 + 32×64", or ""."""
    content = as_json(config)
    named = content if isinstance(content, dict) else {}
    own = "×".join(str(size) for name, size in named.items() if name.startswith("block"))
    return " + ".join(filter(None, (own, *map(_blocks, named.values()))))


if __name__ == "__main__":
    end_with(main)
