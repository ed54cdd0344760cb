"""Says what the benchmarks of operators compute: from names in config.yaml to problems."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from tnp.bench.sizes import columns, in_step
from tnp.dispatch.devices import CPU, Target, of_capability
from tnp.dispatch.registry import catalog
from tnp.dispatch.spec import Problem

if TYPE_CHECKING:
    from workflow.studies import Config

INSTALLED = "installed"  # stands for whatever other packages bring
OURS = "ours"  # stands for all that launches our kernels
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}  # dtypes in names of problems
# The keys of an entry of `ops` that name its problems. It has at least one of them.
SECTIONS = ("shapes", "at", "problems", "suite")


@dataclass(frozen=True)
class Named:
    """Holds a problem, and the name that its rows have as their shape."""

    shape: str
    problem: Problem
    draw: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, int] = field(default_factory=dict)  # further columns of its rows


def of_operator(config: Config, op: str, spec: Any, dtype: str) -> Iterator[Named]:
    """Yields the problems that an entry of a study of operators asks for.

    `shapes` are steps of the neural process. `at` are runs of language models, as in
    "llama3_8b/train", which may say how values are drawn. `problems` are sizes by a name. `suite`
    asks for the operator's own suite. Each problem stands once for each of the entry's `dtypes`,
    which its name then ends with, or once in `dtype`.

    Raises:
        ValueError: a sentence that names what cannot be.
    """
    asked = getattr(spec, "dtypes", None)
    if not asked:
        yield from _in_dtype(config, op, spec, dtype)
    for own in asked or ():
        for named in _in_dtype(config, op, spec, own):
            yield replace(named, shape=f"{named.shape}_{SHORT[own]}")


def _in_dtype(config: Config, op: str, spec: Any, dtype: str) -> Iterator[Named]:
    """Yields the problems of an entry in one dtype."""
    operator = catalog().operator(op)
    for shape in spec.shapes:
        model = config.model | {"d_ff_storage": storage(config, op, spec)}
        sizes = config.shapes[shape]
        found = in_step(operator, model, sizes | {"dtype": dtype})
        if found is None:
            raise ValueError(f"the neural process has no {op}")
        yield Named(shape, *found, columns(op, sizes, model))
    for at in getattr(spec, "at", ()):
        model, between, run = at.partition("/")
        if not between:
            raise ValueError(f"{at!r} must be a model and a run, as in 'llama3_8b/train'")
        for section, name in (("models", model), ("runs", run)):
            known = getattr(config, section)
            if name not in known:
                has = ", ".join(known) or "nothing"
                raise ValueError(f"{at!r} is no model/run: {section} has {has}")
        try:
            values = config.runs[run] | {"dtype": dtype}
            problem = operator.within(config.models[model], values)
        except KeyError as error:
            raise ValueError(f"{at}: {op} needs {error}, which neither of them has") from None
        if problem is None:
            raise ValueError(f"{model} has no {op}")
        yield Named(at, problem, values.get("draw", {}))
    for name, sizes in (getattr(spec, "problems", None) or {}).items():
        yield Named(name, operator.problem(dtype, **sizes))
    if getattr(spec, "suite", False):
        own = operator.suite(dtype)
        if not own:
            raise ValueError(f"{op} has no suite in {dtype}: name its sizes under `problems`")
        yield from map(Named, own, own.values())


def implementations(op: str, named: Iterable[str]) -> list[str]:
    """Returns the names of an entry, with the names that "installed" and "ours" stand for."""
    found: list[str] = []
    for name in named:
        if name == INSTALLED:
            found += catalog().installed(op)
        elif name == OURS:
            found += [one.name for one in catalog().ours(op)]
        else:
            found.append(name)
    return list(dict.fromkeys(found))


def without_case(problem: Problem, device: str) -> str | None:
    """Returns why no gate proves a problem, or None if a case has its dtype and options.

    Options that are numbers, such as heads or a window, may differ: a gate has small numbers.
    """
    if _kind(problem) in _kinds(problem.op, device):
        return None
    options = ", ".join(f"{name} {value}" for name, value in problem.options) or "no option"
    return f"no gate case of {problem.op} has {problem.dtype} and {options}: nothing would prove it"


@cache
def _kinds(op: str, device: str) -> frozenset[tuple]:
    return frozenset(_kind(case.problem) for case in catalog().operator(op).cases(target(device)))


def _kind(problem: Problem) -> tuple:
    """Returns a problem's dtype and options. For a number it says only whether it is given."""
    options = catalog().operator(problem.op).options
    given = [(name, options.get(name) is int or value) for name, value in problem.options]
    return problem.dtype, tuple(given)


def target(device: str) -> Target:
    """Returns a GPU of the newest capability that kernels are made for, or the CPU."""
    return CPU if device == "cpu" else of_capability(90)


def storage(config: Config, op: str, spec: Any) -> int | None:
    """Returns the width that hidden layers are zero-padded to: an entry's, or its operator's."""
    own = getattr(spec, "d_ff_storage", None)
    return own or getattr(config.ops.get(op), "d_ff_storage", None)
