"""Reads the problem of an operator from a command line: its sizes, options, tensors and dtype."""

from __future__ import annotations

import argparse

from tnp.dispatch.spec import FLOATS, Case, Operator, Problem, Value
from tnp.util.checks import require_count
from tnp.util.cli import Parser, option, size

# Options for sizes that recorded rows call otherwise than most operators do.
SPELLED = {
    "heads": "n_heads",
    "kv_heads": "n_kv_heads",
    "n_queries": "n_q",
    "n_keys": "n_k",
    "page": "page_size",
}


def add_problem(parser: Parser, operator: Operator, required: bool = True) -> None:
    """Adds an operator's sizes, options and dtype to a parser. `required`: sizes must be given."""
    for name in operator.sizes:
        spelled = option(SPELLED.get(name, name))
        parser.add_argument(spelled, dest=name, type=size, required=required, metavar="N")
    for name, kind in operator.options.items():
        if kind is bool:
            parser.add_argument(option(name), action="store_true")
        elif isinstance(kind, tuple):
            parser.add_argument(option(name), choices=kind, type=type(kind[0]))
        else:
            parser.add_argument(option(name), type=kind, metavar=kind.__name__)
    for name in operator.optional:
        help_text = f"with the tensor {name}"
        parser.add_argument(option(name), action="store_true", help=help_text)
    parser.add_argument("--dtype", choices=FLOATS, help=f"of the activations; {FLOATS[0]}")


def values(operator: Operator, wanted: argparse.Namespace) -> dict[str, Value]:
    """Returns the sizes, options and tensors that a command line names."""
    names = (*operator.sizes, *operator.options, *operator.optional)
    named = {name: getattr(wanted, name) for name in names}
    return {name: value for name, value in named.items() if value not in (None, False)}


def problem(operator: Operator, dtype: str | None, named: dict[str, Value]) -> Problem:
    """Returns the problem of these sizes and options; None stands for bfloat16.

    Raises:
        ValueError: a name or a value is not allowed, a size is 0, or no tensors have these sizes.
    """
    import torch

    from tnp.ops._shared.random_values import Random

    dtype = dtype or FLOATS[0]
    if dtype not in FLOATS:
        raise ValueError(f"dtype is {dtype!r}: choose from {', '.join(FLOATS)}")
    found = operator.problem(dtype, **named)
    for name, value in found.sizes:
        require_count(name, value, at_least=1)
    case = Case(found)
    drawn = operator.draw(case, Random(case, torch.device("meta")))
    inputs = [drawn.get(name) for name in operator.tensors]
    operator.describe(*inputs, **dict(operator.call_options(found)))
    return found
