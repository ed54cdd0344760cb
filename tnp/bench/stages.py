"""Splits the device time of a training step by stage and pass, from the profiler's kernel times.

A profile of undisturbed steps, or replays of a CUDA graph, has each kernel's name and time, but not
who launched it. So the same step also runs once uncaptured, with marks (`tnp.bench.stage_marks`).
It launches the same kernels in the same order, which gives the stage of each kernel. If the two
sequences differ, nothing is recorded.
"""

import json
import logging
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity

from tnp.bench.stage_marks import OTHER, marking, parsed
from tnp.bench.statistics import summarize
from tnp.tasks.task import Task
from tnp.train.step import TrainingStep

SOURCE = "profiler"  # of a row's times; earlier rows have times between events of an eager step
LAUNCHES = ("cuda_runtime", "cuda_driver")
COPIES = ("gpu_memcpy", "gpu_memset")
AROUND = (OTHER, "forward")  # the place of work that belongs to no stage

Event = dict  # an event of a profile in Chrome's trace format, times in microseconds
Place = tuple[str, str]  # stage, pass

log = logging.getLogger("tnp.bench.stages")


class Mismatch(RuntimeError):
    """Says that two profiles do not have the same kernels in the same order."""


@dataclass(frozen=True)
class Kernel:
    """Holds one kernel that a step launches, and its stage and pass."""

    name: str
    place: Place


def stage_rows(step: TrainingStep, task: Task, n_passes: int) -> list[dict[str, object]]:
    """Returns a row for each stage and pass: its kernels, and ms a step over `n_passes` steps.

    Returns [] and logs a sentence if the profiler cannot tell. The step must have run before. A
    compiled step is recompiled, and once more if it later runs without a graph.
    """
    try:
        undisturbed = _profile(lambda: step(task), n_passes, [ProfilerActivity.CUDA])
        with marking(step):
            sized = step._sized((task,), (task.n_context, task.n_target))
            step._run(*sized)  # compiles
            both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
            marked = _profile(lambda: step._run(*sized), 1, both)
        return rows(undisturbed, placed(marked), n_passes)
    except Exception as problem:  # the step itself has been measured
        log.warning("stages are not recorded: %s: %s", type(problem).__name__, problem)
        return []


def rows(events: list[Event], kernels: list[Kernel], n_steps: int) -> list[dict[str, object]]:
    """Returns rows of table "stages" without their key, from a profile of `n_steps` steps.

    Raises:
        Mismatch: the steps have other kernels than `kernels`, or another order.
    """
    steps = by_place(events, kernels, n_steps)
    places = list(dict.fromkeys(place for step in steps for place in step))
    return [
        {"stage": place[0], "pass": place[1], "source": SOURCE}
        | summarize([sum(step[place]) / 1e3 for step in steps], "time_ms")
        | {"n_kernels": max(len(step[place]) for step in steps)}
        for place in places
    ]


def placed(events: list[Event]) -> list[Kernel]:
    """Returns the kernels of a marked profile, in the order in which they ran, without copies.

    A kernel belongs to the last mark before its launch, or to "other" if the profile lacks its
    launch.
    """
    marks = sorted(
        (event["ts"], place)
        for event in events
        if event.get("cat") == "user_annotation" and (place := parsed(event["name"]))
    )
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {})
    }
    times = [at for at, _ in marks]

    def place_of(event: Event) -> Place:
        at = launched.get(event["args"].get("correlation"))
        n_before = 0 if at is None else bisect(times, at)
        return marks[n_before - 1][1] if n_before else AROUND

    return [
        Kernel(event["name"], place_of(event))
        for event in _on_device(events)
        if event["cat"] not in COPIES
    ]


def by_place(
    events: list[Event], kernels: list[Kernel], n_steps: int
) -> list[dict[Place, list[float]]]:
    """Returns for each step the microseconds of kernels and copies of each stage and pass.

    A copy or memset precedes the kernel that needs it, and shares its place. Copies before a step's
    first kernel, and after the last kernel, belong to the task and the loss.
    """
    found = _on_device(events)
    names = [event["name"] for event in found if event["cat"] not in COPIES]
    expected = [kernel.name for kernel in kernels] * n_steps
    if not names:
        raise Mismatch("the profiler saw no kernel")
    if len(names) != len(expected):
        raise Mismatch(
            f"{n_steps} steps have {len(names)} kernels and the same step with marks {len(kernels)}"
        )
    for at, (name, wanted) in enumerate(zip(names, expected, strict=True)):
        if name != wanted:
            raise Mismatch(
                f"kernel {at % len(kernels)} of a step is {name} and with marks {wanted}"
            )
    steps: list[dict[Place, list[float]]] = [defaultdict(list) for _ in range(n_steps)]
    waiting: list[float] = []  # copies ahead of a kernel
    n_met = 0
    for event in found:
        if event["cat"] in COPIES:
            waiting.append(event["dur"])
            continue
        number, at = divmod(n_met, len(kernels))
        place = kernels[at].place
        for copy in waiting:
            steps[number][place if at else AROUND].append(copy)
        steps[number][place].append(event["dur"])
        waiting, n_met = [], n_met + 1
    for copy in waiting:
        steps[-1][AROUND].append(copy)
    return steps


def _on_device(events: list[Event]) -> list[Event]:
    """Returns kernels and copies in the order in which they began."""
    found = [event for event in events if event.get("cat") in ("kernel", *COPIES)]
    return sorted(found, key=lambda event: event["ts"])


def _profile(run: Callable[[], object], n_runs: int, activities: list) -> list[Event]:
    """Returns the events of `n_runs` runs."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(n_runs):
            run()
        torch.cuda.synchronize()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]
