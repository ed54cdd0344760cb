"""Checks shapes: the sizes of steps and training runs, and how they vary."""

from collections.abc import Iterator

from workflow.faults import Fault, Place
from workflow.settings import MAX_COUNT


def faults(shapes: dict[str, dict]) -> Iterator[Fault]:
    """Yields what section `shapes` says that cannot be."""
    for name, sizes in shapes.items():
        first = next(other for other, its in shapes.items() if its == sizes)
        if first != name:  # rows tell shapes apart by their sizes alone
            yield Fault(("shapes", name), f"has the sizes of shape {first!r}: use {first!r} alone")
        yield from faults_of_points(("shapes", name), sizes, MAX_COUNT)
        if "vary" in sizes:
            yield from _faults_of_means(("shapes", name), sizes)


def faults_of_points(place: Place, sizes: dict, most: int) -> Iterator[Fault]:
    n_context, n_target = sizes["n_context"], sizes["n_target"]
    if n_context + n_target > most:
        yield Fault(
            place,
            f"n_context {n_context} and n_target {n_target} are {n_context + n_target} points: "
            f"they must be at most {most}",
            ("n_context",),
        )


def faults_of_drawn(place: Place, vary: dict, most: int) -> Iterator[Fault]:
    """Yields faults of a training run's own sizes, of at most `most` points."""
    if vary.get("each", "batch") != "batch":
        what = "sizes of a training run are drawn for each batch: leave `each` out"
        yield Fault((*place, "each"), what)
    yield from _faults_of_ranges(place, vary)
    points = min(vary.get("together", MAX_COUNT), vary["n_context"][1] + vary["n_target"][1])
    if points > most:
        yield Fault(place, f"up to {points} points are drawn: they must be at most {most}")


def _faults_of_ranges(place: Place, vary: dict) -> Iterator[Fault]:
    for name in ("n_context", "n_target"):
        least, most = vary[name]
        if least > most:
            what = f"[{least}, {most}] must go from the smallest to the largest"
            yield Fault((*place, name), what)
    needed = vary["n_context"][1] + vary["n_target"][0]
    if vary.get("together", needed) < needed:
        what = f"{vary['together']} must be at least {needed}"
        yield Fault((*place, "together"), f"{what}, the largest context and the fewest targets")


def _faults_of_means(place: Place, sizes: dict) -> Iterator[Fault]:
    """Yields faults of a shape that varies, which has the means of its sizes in its rows."""
    vary = sizes["vary"]
    if vary.get("log"):
        yield Fault((*place, "vary", "log"), "log is for training runs: a shape has even sizes")
    yield from _faults_of_ranges((*place, "vary"), vary)
    for name in ("n_context", "n_target"):
        least, most = vary[name]
        if name == "n_target":
            most = min(most, vary.get("together", MAX_COUNT) - sizes["n_context"])
        middle = (least + most + 1) // 2
        if sizes[name] != middle:
            what = f"{name} is {sizes[name]}: it must be {middle}, the mean of {least} to {most}"
            yield Fault(place, what, (name,))
