"""Makes the recorded training runs: AdamW with warm-up and cosine decay, held-out evaluation.

Every step is a function of (seed, step), so a killed and resumed run gives the rows and weights of
an unbroken run. Held-out tasks have a seed, and images also pictures, that are never trained on.
The same tasks are also evaluated with the context's y values shuffled: a model that uses its
context is clearly better with the true context.
"""

import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from tnp.model.buckets import Buckets
from tnp.model.config import TNPConfig
from tnp.model.prediction import Prediction
from tnp.model.transformer_np import TransformerNP
from tnp.model.variants import Variant
from tnp.ops.mixture_nll import mixture_nll
from tnp.store.schemas import check_fits
from tnp.tasks.gaussian_process import PUBLISHED, SMOOTH, GaussianProcessTasks
from tnp.tasks.images import ImageTasks
from tnp.tasks.sizes import varying_sizes
from tnp.tasks.sources import MAX_POINTS
from tnp.tasks.task import Task
from tnp.train.emulated_products import emulated
from tnp.train.loop import LATEST, WATCHED, Diverged, Report, cosine, fit, load_state
from tnp.train.step import TrainingStep

HELD_OUT_SEED = 2**32 - 1  # no run has it: table `training` keeps seeds in 31 bits
N_HELD_OUT_BATCHES = 8
N_HELD_OUT_VARYING = 128  # more, because all tasks of a batch have one size
COVERED = 0.9  # share of targets that a calibrated interval holds
PROCESSES = {"gaussian_process": SMOOTH, "published_gaussian_process": PUBLISHED}
# Columns of table `training` that do not change during a run.
RUN_COLUMNS = (
    "config_id", "run", "variant", "source", "batch", "n_context", "n_target", "dtype", "seed",
)  # fmt: skip
OPTIONAL_COLUMNS = {
    "study": "", "baseline": "", "operators": "", "products": "", "last_in_16_bits": 0,
}  # fmt: skip
# Parameters of column `recipe`: a run and its baseline have equal ones, and differ in the variant.
RECIPE = (
    "source", "batch", "n_context", "n_target", "vary", "held_out_vary", "model", "dtype",
    "steps", "learning_rate", "warmup_steps", "max_grad_norm",
)  # fmt: skip


def run(
    parameters: dict,
    device: torch.device | str,
    checkpoint_dir: Path,
    on_row: Callable[[dict], None],
) -> TransformerNP:
    """Trains one run of config.yaml, from its last checkpoint if there is one.

    At every evaluation the state is written to `latest.pt` in `checkpoint_dir`, and at the end to
    `final.pt` instead. Called again with the same parameters, a finished run gives its rows again.
    Otherwise it starts from step 0, and `final.pt` stays until the new run has ended. A run that
    diverges ends with a row whose held-out log-likelihood is not finite, and has no `final.pt`.

    Args:
        parameters: run, source, batch, n_context, n_target, variant, variant_spec, model, dtype,
            steps, learning_rate, warmup_steps, eval_every, seed; where given `max_grad_norm`,
            `vary` (sizes of training tasks), `held_out_vary` (sizes of held-out tasks), `study`,
            `baseline`, `operators`, `products` (the format that a control emulates) and
            `last_in_16_bits` (how many of the last steps of a variant in 8 bits are in 16).
        device: where to train.
        checkpoint_dir: the folder of this run's checkpoints; no other run or code shares it.
        on_row: receives every row of table `training`, also rows before a resume.

    Raises:
        ValueError: the source is unknown, a picture has too few pixels, table `training` cannot
            hold a value, or a checkpoint is damaged or belongs to another run.
        RuntimeError: the model predicts better than the exact posterior.
    """
    check_fits("training", parameters | {"step": parameters["steps"]})
    device = torch.device(device)
    training, held_out = sources(parameters, device)
    variant = Variant.from_spec(parameters["variant"], parameters["variant_spec"])
    config = TNPConfig(**parameters["model"], d_x=training.d_x, sigma_min=training.sigma_min)
    torch.manual_seed(parameters["seed"])
    model = TransformerNP(config, variant, getattr(torch, parameters["dtype"])).to(device)
    recipe = {name: parameters[name] for name in RECIPE if name in parameters}
    constant = {name: parameters[name] for name in RUN_COLUMNS}
    constant |= {"recipe": json.dumps(recipe, sort_keys=True)}
    constant |= {name: parameters.get(name, value) for name, value in OPTIONAL_COLUMNS.items()}
    latest, final = checkpoint_dir / LATEST, checkpoint_dir / "final.pt"
    # The rows of a finished run may be lost, if it was killed before they were written.
    if not latest.exists() and final.exists() and load_state(final, "cpu")["about"] == parameters:
        os.replace(final, latest)
    with tqdm(total=parameters["steps"], desc=parameters["run"], unit="step", disable=None) as bar:

        def tasks(index: int) -> Task:
            bar.update(index + 1 - bar.n)
            seed = parameters["seed"]
            return training.sample(
                seed, index, *_sizes(parameters, parameters.get("vary"), seed, index)
            )

        logged: set[int] = set()

        def log(report: Report) -> None:
            if report["step"] not in logged:  # a run that goes on repeats its reports
                logged.add(report["step"])
                bar.set_postfix(held_out=f"{report[WATCHED]:.3f}")
                on_row(constant | report)

        evaluation = Evaluation(held_out, parameters)

        def train(model: TransformerNP, until: int) -> None:
            step = TrainingStep(
                model,
                learning_rate=parameters["learning_rate"],
                max_grad_norm=parameters.get("max_grad_norm"),
                cuda_graph=parameters.get("cuda_graph", device.type == "cuda"),
                buckets=Buckets.of(parameters.get("vary")),
            )
            with emulated(constant["products"]) as unrounded:
                fit(
                    step,
                    tasks,
                    until,
                    schedule=lambda index: cosine(
                        index, *(parameters[x] for x in ("learning_rate", "warmup_steps", "steps"))
                    ),
                    evaluate=unrounded(evaluation),
                    every=parameters["eval_every"],
                    folder=checkpoint_dir,
                    on_report=log,
                    about=parameters,
                )

        last = constant["last_in_16_bits"]
        try:
            train(model, parameters["steps"] - last)
            if last:  # the state in the folder fits any variant
                model = _in_16_bits(model)
                train(model, parameters["steps"])
        except Diverged as error:
            log(error.report)
            return model
    os.replace(latest, final)
    return model


def sources(
    parameters: dict, device: torch.device
) -> tuple[GaussianProcessTasks | ImageTasks, GaussianProcessTasks | ImageTasks]:
    """Returns the sources of training and held-out tasks."""
    process = PROCESSES.get(parameters["source"])
    if process is not None:
        tasks = GaussianProcessTasks(device, process)
        return tasks, tasks
    if parameters["source"] == "images":
        n_points = parameters["n_context"] + parameters["n_target"]
        return ImageTasks(n_points, device), ImageTasks(n_points, device, held_out=True)
    raise ValueError(
        f"unknown source {parameters['source']!r}: choose from {', '.join(MAX_POINTS)}"
    )


def _sizes(parameters: dict, vary: dict | None, seed: int, index: int) -> tuple[int, int, int]:
    """Returns the numbers of tasks, context points and target points of a batch."""
    if vary is None:
        return tuple(parameters[name] for name in ("batch", "n_context", "n_target"))
    return parameters["batch"], *varying_sizes(vary, seed, index)


def _in_16_bits(model: TransformerNP) -> TransformerNP:
    """Returns a model of the same weights, with our 16-bit operators in place of 8-bit ones."""
    other = TransformerNP(model.config, model.variant.without_8_bits, model.compute_dtype)
    other.load_state_dict(model.state_dict())
    return other.to(next(model.parameters()).device)


class Evaluation:
    """Computes held-out log-likelihoods in nats per target value, always over the same tasks.

    Weights that were trained in 8 bits predict in 16, so that the cost of training in 8 bits is
    seen apart from that of predicting.
    """

    def __init__(self, tasks: GaussianProcessTasks | ImageTasks, parameters: dict) -> None:
        vary = parameters.get("held_out_vary")
        self._varies = vary is not None
        n_batches = N_HELD_OUT_BATCHES if vary is None else N_HELD_OUT_VARYING
        self._tasks = [
            tasks.sample(HELD_OUT_SEED, index, *_sizes(parameters, vary, HELD_OUT_SEED, index))
            for index in range(n_batches)
        ]
        self._prior = torch.cat([tasks.prior_log_likelihood(task) for task in self._tasks])
        self._exact = None
        if isinstance(tasks, GaussianProcessTasks):
            self._exact = torch.cat(
                [
                    tasks.exact_log_likelihood(task, HELD_OUT_SEED, index)
                    for index, task in enumerate(self._tasks)
                ]
            )

    @torch.no_grad()
    def __call__(self, model: TransformerNP) -> dict[str, float | None]:
        """Returns the `…_log_likelihood…` and `heldout_…` columns of a row of table `training`."""
        in_8_bits = None
        if model.variant.in_8_bits:
            in_8_bits = _mean(self._log_likelihoods(model))
            model = _in_16_bits(model)
        true = self._log_likelihoods(model)
        shuffled = torch.cat(
            [self._log_likelihood(model, task.with_shuffled_context()) for task in self._tasks]
        )
        if self._exact is not None:
            check_no_leak(self._independent(true), self._independent(self._exact))
        return self._joint(model) | {
            "heldout_log_likelihood": _mean(true),
            "heldout_log_likelihood_8_bits": in_8_bits,
            "heldout_log_likelihood_shuffled": _mean(shuffled),
            "heldout_log_likelihood_stderr": _standard_error(self._independent(true)),
            "heldout_coverage": _mean(
                torch.cat([self._covered(model, task) for task in self._tasks])
            ),
            "exact_log_likelihood": None if self._exact is None else _mean(self._exact),
            "prior_log_likelihood": _mean(self._prior),
        }

    def _log_likelihoods(self, model: TransformerNP) -> torch.Tensor:
        return torch.cat([self._log_likelihood(model, task) for task in self._tasks])

    def _joint(self, model: TransformerNP) -> dict[str, float | None]:
        """Returns the `joint_…` columns of the first held-out batch: each target takes a pass."""
        columns = "joint_log_likelihood", "joint_log_likelihood_anew", "joint_difference_stderr"
        if model.config.buffer is None:
            return dict.fromkeys(columns)
        task = self._tasks[0]
        n_values = task.y_target[0].numel()
        kept, anew = (model.joint_log_density(task, buffer) / n_values for buffer in (True, False))
        return dict(
            zip(columns, (_mean(kept), _mean(anew), _standard_error(kept - anew)), strict=True)
        )

    def _independent(self, values: torch.Tensor) -> torch.Tensor:
        """Returns values of each task, or of each batch if its tasks share a drawn size."""
        return values.view(len(self._tasks), -1).mean(1) if self._varies else values

    @staticmethod
    def _covered(model: TransformerNP, task: Task) -> torch.Tensor:
        """Returns each task's share of target values inside their central interval, [B]."""
        parameters = model(task.x_context, task.y_context, task.x_target)
        below = Prediction(parameters, model.config.sigma_min).marginal_cdf(task.y_target)
        return ((below - 0.5).abs() <= COVERED / 2).double().mean((1, 2))

    @staticmethod
    def _log_likelihood(model: TransformerNP, task: Task) -> torch.Tensor:
        parameters = model(task.x_context, task.y_context, task.x_target)
        nll = torch.vmap(partial(mixture_nll, sigma_min=model.config.sigma_min))
        return -nll(parameters, task.y_target) / task.y_target.shape[-1]


def check_no_leak(log_likelihood: torch.Tensor, exact: torch.Tensor) -> None:
    """Raises RuntimeError if a model is better than the exact posterior of its context.

    Both are [n_tasks], for the same tasks. The difference may be up to three standard errors.
    """
    excess = log_likelihood.double() - exact
    if _mean(excess) > 3.0 * _standard_error(excess):
        raise RuntimeError(
            f"the model reaches {_mean(log_likelihood):.3f} nats a target, more than the exact "
            f"posterior's {_mean(exact):.3f}: it sees its targets"
        )


def _mean(values: torch.Tensor) -> float:
    return values.double().mean().item()


def _standard_error(values: torch.Tensor) -> float:
    return values.double().std().item() / math.sqrt(len(values))
