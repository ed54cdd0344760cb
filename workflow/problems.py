"""What the benchmarks of operators compute: from names in config.yaml to problems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tnp.bench.sizes import columns, in_step
from tnp.dispatch.devices import CPU, Target, of_capability
from tnp.dispatch.registry import catalog
from tnp.dispatch.spec import Problem

INSTALLED = "installed"  # stands for whatever other packages bring
SECTIONS = ("shapes", "at", "problems")  # of an entry of `ops`, at least one of which it has


@dataclass(frozen=True)
class Named:
    """A problem by the name that its rows have as their shape."""

    shape: str
    problem: Problem
    draw: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, int] = field(default_factory=dict)  # of its rows, beside the problem


def of_operator(config: dict, op: str, spec: dict, dtype: str) -> Iterator[Named]:
    """Those that an entry of section `ops` or `noise` asks for.

    `shapes` are steps of the neural process, `at` runs of language models ("llama3_8b/train"),
    which may say how values are drawn, `problems` sizes by a name. Raises ValueError with a
    sentence that names what cannot be.
    """
    operator = catalog().operator(op)
    for shape in spec.get("shapes", ()):
        model = config["model"] | {"d_ff_storage": storage(config, op, spec)}
        sizes = config["shapes"][shape]
        found = in_step(operator, model, sizes | {"dtype": dtype})
        if found is None:
            raise ValueError(f"the neural process has no {op}")
        yield Named(shape, *found, columns(op, sizes, model))
    for at in spec.get("at", ()):
        model, between, run = at.partition("/")
        if not between:
            raise ValueError(f"{at!r} must be a model and a run, as in 'llama3_8b/train'")
        for section, name in (("models", model), ("runs", run)):
            if name not in config.get(section, {}):
                known = ", ".join(config.get(section, {}))
                raise ValueError(f"{at!r} is no model/run: {section} has {known or 'nothing'}")
        try:
            values = config["runs"][run] | {"dtype": dtype}
            problem = operator.within(config["models"][model], values)
        except KeyError as error:
            raise ValueError(f"{at}: {op} needs {error}, which neither of them has") from None
        if problem is None:
            raise ValueError(f"{model} has no {op}")
        yield Named(at, problem, values.get("draw", {}))
    for name, sizes in spec.get("problems", {}).items():
        yield Named(name, operator.problem(dtype, **sizes))


def operator_of(study: str, spec: dict) -> str:
    """An entry of `ops` is called as its operator, or names it."""
    return spec.get("op", study)


def implementations(op: str, spec: dict) -> list[str]:
    """Those that an entry names, and for "installed" what other packages bring."""
    found: list[str] = []
    for name in spec["implementations"]:
        found += catalog().installed(op) if name == INSTALLED else [name]
    return list(dict.fromkeys(found))


def without_case(problem: Problem, device: str) -> str | None:
    """Why no gate could prove it: a sentence, or None where a case has its dtype and options.

    Options that are numbers, such as heads or a window, may be others: a gate has small ones.
    """
    if _kind(problem) in _kinds(problem.op, device):
        return None
    options = ", ".join(f"{name} {value}" for name, value in problem.options) or "no option"
    return f"no gate case of {problem.op} has {problem.dtype} and {options}: nothing would prove it"


@cache
def _kinds(op: str, device: str) -> frozenset[tuple]:
    """Those of all cases of an operator."""
    return frozenset(_kind(case.problem) for case in catalog().operator(op).cases(target(device)))


def _kind(problem: Problem) -> tuple:
    """A problem's dtype and options; of an option that is a number, only whether it is given."""
    options = catalog().operator(problem.op).options
    given = [(name, options.get(name) is int or value) for name, value in problem.options]
    return problem.dtype, tuple(given)


def target(device: str) -> Target:
    """What cases are asked for: a GPU of the newest capability that kernels are made for."""
    return CPU if device == "cpu" else of_capability(90)


def storage(config: dict, op: str, spec: dict) -> int | None:
    """The width that a benchmark zero-pads hidden layers to: its own, or else its operator's."""
    return spec.get("d_ff_storage", config["ops"].get(op, {}).get("d_ff_storage"))
