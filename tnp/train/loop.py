"""Trains in a loop: any source of tasks, schedules, averaged weights, early stopping, resume."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tnp.model.transformer_np import TransformerNP
from tnp.tasks.task import Task, require_tasks
from tnp.train.step import TrainingStep
from tnp.util import tensor_archive
from tnp.util.checks import require_count, require_real

log = logging.getLogger("tnp.train.loop")

LATEST = "latest.pt"
KEYS = frozenset(
    {"step", "model", "optimizer", "average", "best", "reports", "elapsed_s", "about", "kind"}
)
WATCHED = "heldout_log_likelihood"  # decides early stopping and divergence
OWN_NAMES = ("step", "loss", "learning_rate", "elapsed_s")  # names in every report

_SOURCES = "it must be a function, a list or a DataLoader, or a generator that does not end"

Report = dict[str, float | int | None]
Source = Callable[[int], Task] | Iterable[Task]


class Diverged(RuntimeError):
    """Says at which step training diverged. `report` is that step's report."""

    def __init__(self, sentence: str, report: Report) -> None:
        super().__init__(sentence)
        self.report = report


class HeldOut:
    """Evaluates a model on tasks that it is not trained on."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.tasks = list(tasks)
        if not self.tasks:
            raise ValueError("there is no held-out task: give at least one")
        require_tasks("held-out tasks", self.tasks)
        for task in self.tasks:
            task.check_finite()

    @torch.no_grad()
    def __call__(self, model: TransformerNP) -> Report:
        """Returns the mean log-likelihood in nats per target."""
        device, total, count = next(model.parameters()).device, 0.0, 0
        for task in self.tasks:
            _, n = task.count()
            task = task.to(device)
            task.check_finite(model.units)
            total, count = total - n * model.loss(task).item(), count + n
        return {WATCHED: total / count}


def cosine(step: int, peak: float, warmup_steps: int, steps: int, final: float = 0.1) -> float:
    """Returns a schedule: linear warm-up to `peak`, then half a cosine down to `final` of it."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return peak * (final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress)))


@dataclass
class Fit:
    """Holds the results of training."""

    model: TransformerNP  # the averaged or the best model, if requested
    reports: list[Report]
    stopped_early: bool


def fit(
    step: TrainingStep,
    tasks: Source,
    n_steps: int,
    *,
    schedule: Callable[[int], float] | None = None,
    accumulate: int = 1,
    average: float | None = None,
    evaluate: Callable[[TransformerNP], Report] | None = None,
    every: int = 100,
    patience: int | None = None,
    folder: Path | str | None = None,
    on_report: Callable[[Report], None] = lambda report: None,
    about: Mapping | None = None,
) -> Fit:
    """Trains `step.model` until it has made `n_steps` steps.

    With a folder, the state is written there at every report, and a later call continues from it.
    If `tasks` is a function of the step, a killed run ends like an unbroken one. A finished run
    continues if `n_steps` is larger. A warning of logger `tnp.train.loop` says from which step it
    continues, and which settings of the optimizer come from the state.

    Args:
        step: the training step, with model and optimizer.
        tasks: a function of the step's number, or an iterable, which is started again at its end: a
            `DataLoader` whose `collate_fn` is `tnp.tasks.collate`, a list, a generator. Tasks are
            moved to the model's device. Tasks on the CPU must be finite.
        n_steps: number of steps in all, with steps before a resume.
        schedule: the learning rate of each step. None: the optimizer's own.
        accumulate: tasks whose gradients are added up before each update.
        average: the share that an average of the weights keeps at each step, such as 0.999. The
            averaged model is evaluated and returned.
        evaluate: returns numbers by name for a model, as `HeldOut` does. They are added to the
            report. None may be called step, loss, learning_rate or elapsed_s.
        every: steps between reports.
        patience: training stops after so many reports without a better held-out log-likelihood, and
            returns the best model.
        folder: where to keep the state, a file `latest.pt`.
        on_report: receives each report, also those before a resume: step, loss (the mean since the
            last report, None at step 0), learning_rate, elapsed_s, and the numbers of `evaluate`.
            With a schedule all parameters have one learning rate.
        about: numbers, texts, lists and dicts that are saved with the state. A resumed run must
            have the same.

    Raises:
        ValueError: an argument is out of range, or a state is damaged or belongs to another model.
        TypeError: an argument has another type, or `tasks` gives something that is no `Task`.
        Diverged: a RuntimeError. The held-out log-likelihood is NaN or infinite.
    """
    if not isinstance(step, TrainingStep):
        raise TypeError(f"step is a {type(step).__name__}: it must be a TrainingStep")
    n_steps, accumulate, every = (
        require_count(name, value, at_least=1)
        for name, value in (("n_steps", n_steps), ("accumulate", accumulate), ("every", every))
    )
    if patience is not None:
        patience = require_count("patience", patience, at_least=1)
        if evaluate is None:
            raise ValueError("patience needs `evaluate`, whose numbers decide when to stop")
    for name, given in (("schedule", schedule), ("evaluate", evaluate)):
        if given is not None and not callable(given):
            raise TypeError(f"{name} is a {type(given).__name__}: it must be a function or None")
    if not callable(tasks) and not isinstance(tasks, Iterable):
        raise TypeError(f"tasks is a {type(tasks).__name__}: {_SOURCES}")
    if average is not None:
        average = require_real("average", average)
        if not 0 < average < 1:
            raise ValueError(f"average is {average}: it must lie between 0 and 1")
    run = _Run(step, schedule, average, evaluate, patience, folder, on_report, dict(about or {}))
    run.kind["accumulate"] = accumulate
    run.resume(n_steps, is_function=callable(tasks))
    given = _tasks(tasks, run.done * accumulate, step.model)
    if not run.reports:
        run.report()
    while run.done < n_steps and not run.is_stale():
        run.train([next(given) for _ in range(accumulate)])
        if run.done % every == 0 or run.done == n_steps:
            run.report()
    return Fit(run.chosen(), run.reports, run.done < n_steps)


def _tasks(tasks: Source, first: int, model: TransformerNP) -> Iterator[Task]:
    """Yields tasks from number `first` on, on the model's device."""
    device, units = next(model.parameters()).device, model.units.on_host()
    if callable(tasks):
        made: Iterator = map(tasks, itertools.count(first))
    else:
        made = _again_and_again(tasks)
    for task in made:
        if not isinstance(task, Task):
            raise TypeError(
                f"tasks gives a {type(task).__name__}: it must give a tnp.tasks.Task, which "
                "tnp.tasks.collate makes of a list of them"
            )
        # The step checks tasks that stay on the CPU.
        if device.type != "cpu" and task.x_context.device.type == "cpu":
            task.check_finite(units)
        yield task.to(device, non_blocking=True)


def _again_and_again(tasks: Iterable[Task]) -> Iterator[Task]:
    while True:
        n = 0
        for task in tasks:
            n += 1
            yield task
        if n == 0:
            raise ValueError(
                f"tasks has ended and gives nothing when it is started again: {_SOURCES}"
            )


class _Run:
    """Holds the state of a training run."""

    def __init__(
        self, step, schedule, average, evaluate, patience, folder, on_report, about
    ) -> None:
        self.step, self.schedule = step, schedule
        self.evaluate, self.patience = evaluate, patience
        self.file = None if folder is None else Path(folder) / LATEST
        self.on_report, self.about = on_report, tensor_archive.plain_values("about", about)
        self.done, self.reports, self.elapsed_s = 0, [], 0.0
        self.average = None
        if average is not None:
            self.average = AveragedModel(step.model, multi_avg_fn=get_ema_multi_avg_fn(average))
        self.best: dict | None = None  # with patience: weights and number of the best report
        normalization = step.model.normalization
        self.kind = asdict(step.model.config) | {
            "compute_dtype": str(step.model.compute_dtype),
            "optimizer": type(step.optimizer).__name__,
            "average": average,
            "normalization": normalization and normalization.numbers(),
        }
        self._sum = torch.zeros((), device=next(step.model.parameters()).device)
        self._n_summed, self._started = 0, time.perf_counter()

    @property
    def model(self) -> TransformerNP:
        """Returns the model that is evaluated."""
        return self.step.model if self.average is None else self.average.module

    def train(self, tasks: Sequence[Task]) -> None:
        if self.schedule is not None:
            self.step.set_learning_rate(self._rate())
        self._sum += self.step(*tasks)
        self._n_summed += 1
        self.done += 1
        if self.average is not None:
            self.average.update_parameters(self.step.model)

    def report(self) -> None:
        report = {
            "step": self.done,
            "loss": self._sum.item() / self._n_summed if self._n_summed else None,
            "learning_rate": self._rate(),
            **self._evaluated(),
            "elapsed_s": self.elapsed_s + time.perf_counter() - self._started,
        }
        watched = report.get(WATCHED, report["loss"])
        if watched is not None and not math.isfinite(watched):
            what = "held-out log-likelihood" if WATCHED in report else "loss"
            sentence = f"the {what} is {watched} at step {self.done}: the run diverged"
            raise Diverged(sentence, report)
        self._sum.zero_()
        self._n_summed = 0
        self.reports.append(report)
        if self.patience is not None and self._is_better(report):
            weights = copy.deepcopy(self.model.state_dict())
            self.best = {"weights": weights, "report": len(self.reports) - 1}
        if self.file is not None:
            self._save()
        self.on_report(report)

    def _rate(self) -> float:
        """Returns the learning rate of the next step."""
        if self.schedule is not None:
            return require_real(
                f"the schedule's rate of step {self.done}", self.schedule(self.done)
            )
        return float(self.step.optimizer.param_groups[0]["lr"])

    def _evaluated(self) -> Report:
        found = self.evaluate(self.model) if self.evaluate else {}
        if not isinstance(found, Mapping):
            raise TypeError(
                f"evaluate gives a {type(found).__name__}: it must give a report's numbers by name"
            )
        for name in OWN_NAMES:
            if name in found:
                raise ValueError(
                    f"evaluate gives {name!r}, which every report has already: choose another "
                    f"name, such as 'heldout_{name}'"
                )
        if self.patience is not None and found.get(WATCHED) is None:
            raise ValueError(f"evaluate gives no {WATCHED!r}, which patience needs")
        return {
            name: value if value is None else require_real(f"evaluate's {name}", value)
            for name, value in found.items()
        }

    def _is_better(self, report: Report) -> bool:
        return self.best is None or report[WATCHED] > self.reports[self.best["report"]][WATCHED]

    def is_stale(self) -> bool:
        if self.patience is None or self.best is None:
            return False
        return len(self.reports) - 1 - self.best["report"] >= self.patience

    def chosen(self) -> TransformerNP:
        if self.patience is None or self.best is None:
            return self.model
        model = copy.deepcopy(self.model)
        model.load_state_dict(self.best["weights"])
        return model

    def _save(self) -> None:
        state = {
            "step": self.done,
            "model": self.step.model.state_dict(),
            "optimizer": self.step.optimizer.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "best": self.best,
            "reports": self.reports,
            "elapsed_s": self.reports[-1]["elapsed_s"],
            "about": self.about,
            "kind": self.kind,
        }
        tensor_archive.save(self.file, state)

    def resume(self, n_steps: int, is_function: bool) -> None:
        """Continues from the folder's state, if there is one, and logs it."""
        if self.file is None or not self.file.exists():
            return
        state = load_state(self.file, next(self.step.model.parameters()).device)
        for here, there in ((self.kind, state["kind"]), (self.about, state["about"])):
            self._require_same(here, there)
        shapes = {name: x.shape for name, x in self.step.model.state_dict().items()}
        if shapes != {name: x.shape for name, x in state["model"].items()}:
            raise ValueError(
                f"checkpoint {self.file} has weights of other names or shapes, such as those of a "
                "variant with another d_ff_storage: delete it to start the run again from step 0"
            )
        mine = _settings(self.step.optimizer)
        self.step.load_optimizer(state["optimizer"])
        self.step.model.load_state_dict(state["model"])
        self._say_resumed(state, n_steps, mine)
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.done, self.reports, self.best = state["step"], state["reports"], state["best"]
        self.elapsed_s = state["elapsed_s"]
        if not is_function:
            log.warning(
                "resumed at step %d: tasks is no function of the step and begins anew, so that "
                "this run is not the one that an unbroken one would have been",
                self.done,
            )
        for report in self.reports:
            self.on_report(report)

    def _say_resumed(self, state: dict, n_steps: int, mine: dict) -> None:
        done, n_reports = state["step"], len(state["reports"])
        log.warning(
            "goes on from step %d of %s: its %d reports come first", done, self.file, n_reports
        )
        if done >= n_steps:
            log.warning(
                "that run has made %d steps and n_steps is %d: nothing is trained", done, n_steps
            )
        theirs = _settings(self.step.optimizer)
        if self.schedule is not None:
            theirs.pop("learning_rate", None)
        other = [
            f"{name} {value} there and {mine[name]} here"
            for name, value in theirs.items()
            if name in mine and not _is_same(mine[name], value)
        ]
        if other:
            log.warning(
                "the optimizer keeps the settings of %s: %s: delete the file to train with those "
                "that are given here",
                self.file, "; ".join(other),
            )  # fmt: skip

    def _require_same(self, here: Mapping, there: Mapping) -> None:
        """Raises ValueError that names the first value in which the checkpoint differs."""
        for name in sorted(here.keys() | there.keys()):
            mine, theirs = here.get(name), there.get(name)
            if mine != theirs:
                raise ValueError(
                    f"checkpoint {self.file} is of another run: {name} is {theirs!r} there and "
                    f"{mine!r} here: delete the file to start again from step 0, or set the value "
                    "back"
                )


def _is_same(mine: object, theirs: object) -> bool:
    """Returns whether two settings are equal. A learning rate on a GPU is rounded to float32."""
    if isinstance(mine, float) and isinstance(theirs, float):
        return math.isclose(mine, theirs, rel_tol=1e-6)
    return mine == theirs


def _settings(optimizer: torch.optim.Optimizer) -> dict:
    """Returns an optimizer's settings by name: a list with the value of each group of parameters,
    or one value if all are equal.
    """
    found: dict[str, list] = {}
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name != "params":
                value = value.item() if isinstance(value, torch.Tensor) else value
                found.setdefault("learning_rate" if name == "lr" else name, []).append(value)
    return {
        name: values[0] if all(value == values[0] for value in values) else values
        for name, values in found.items()
    }


def load_state(file: Path, device: torch.device | str) -> dict:
    """Returns the state that `fit` has written. Raises ValueError if it cannot be used."""
    remedy = "delete it to start the run again from step 0"
    return tensor_archive.load(file, device, KEYS, "checkpoint", remedy)
