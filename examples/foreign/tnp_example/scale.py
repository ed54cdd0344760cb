"""Declares operator `scale`, y = factor · x. Planning imports it, so it imports no torch."""

from math import prod

from tnp.dispatch.spec import FLOATS, Case, Implementation, Operator, Work


def reference(x, factor):
    """Returns factor · x."""
    return x * factor


def describe(x):
    """Returns the sizes of a problem."""
    return {"n": prod(x.shape)}


def draw(case, random):
    """Returns inputs by name."""
    return {"x": random(case.problem["n"])}


def work(case, pass_):
    """Counts every element once."""
    size = case.problem["n"] * case.problem.itemsize
    return Work({}, size, size)


def cases(target):
    """Returns the cases that the gate compares."""
    return [Case(OPERATOR.problem(dtype, n=n)) for dtype in FLOATS for n in (1, 257)]


OPERATOR = Operator(
    "scale",
    inputs=("x",),
    outputs=("y",),
    sizes=("n",),
    implementations=(Implementation("torch", run=reference, provider="torch"),),
    describe=describe,
    draw=draw,
    reference=reference,
    work=work,
    cases=cases,
    differentiated=("x",),
    scalars={"factor": 1.5},
    controls={"factor missing": lambda x, factor: x},
)
