"""Measures what training steps cost the host, with ours and PyTorch's in turn in one process.

A form of a step is a variant, launched from Python or replayed as a CUDA graph. All forms of a
shape are built first, each with its own model, and then take turns. Each has two times:

    host_ms   from the call of a step until it returns, on an idle device
    step_ms   one of `LOOP` steps back to back, until the device has finished the last one

If `step_ms` is little more than `host_ms`, the host limits the loop. If `host_ms` is clearly
shorter, the device limits it.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable

import torch

from tnp.bench.outcome import of_step_form
from tnp.bench.statistics import summarize
from tnp.bench.steps import LEARNING_RATE, random_task, require_supported
from tnp.bench.timing import first_call, synchronize
from tnp.experiment.failures import Unsupported, classify
from tnp.model.config import TNPConfig
from tnp.model.transformer_np import TransformerNP
from tnp.model.variants import Variant
from tnp.train.step import TrainingStep
from tnp.train.step_graphs import N_EAGER_BEFORE_CAPTURE

FIRST_STEPS = N_EAGER_BEFORE_CAPTURE + 2  # until everything is compiled, captured and replayed once
WARM_ROUNDS, ROUNDS = 1, 20
ALONE, LOOP = 3, 8  # steps of one turn: each from an idle device, and back to back

Run = Callable[[], object]


def measure_host_steps(parameters: dict, note: Callable[[str], None] = lambda doing: None) -> list:
    """Returns rows of table "host_steps", one a form, without provenance.

    A form that fails, or that this device cannot run, has a status and a reason. Others go on.

    Args:
        parameters: `shape`, its sizes, `model`, `dtype`, `device`, `replicate`; and `forms`, each
            with `variant`, `variant_spec` and `cuda_graph`.
        note: is called with what begins, so that nobody takes a long compilation for a hang.
    """
    device = torch.device(parameters["device"])
    rows, runs = [], []
    for form in parameters["forms"]:
        row = of_step_form(parameters, form)
        name = f"{form['variant']}{' with a graph' if form['cuda_graph'] else ''}"
        note(f"builds {name}")
        try:
            run = step_of(parameters | form, device)
            row["compile_s"] = sum(first_call(run, device) for _ in range(FIRST_STEPS))
        except Exception as error:  # any failure is this form's result
            row["status"], row["reason"] = classify(error)
        else:
            row["status"], row["reason"] = "ok", ""
            runs.append((row, run))
        run = None
        gc.collect()  # an exception held the tensors of a form that failed
        rows.append(row)
    samples = _in_turn([run for _, run in runs], device, note)
    for (row, _), (alone, loop) in zip(runs, samples, strict=True):
        row |= summarize(alone, "host_ms") | summarize(loop, "step_ms") | {"n_samples": len(alone)}
    return rows


def step_of(parameters: dict, device: torch.device) -> Run:
    """Returns a call that makes one training step, always of the same task.

    Args:
        parameters: `batch`, `n_context`, `n_target`, `model`, `dtype`, `replicate`, and the form's
            `variant`, `variant_spec` and `cuda_graph`.
        device: where the model lies.

    Raises:
        Unsupported: this device cannot run the form; the message says why.
    """
    if parameters["cuda_graph"] and device.type != "cuda":
        raise Unsupported(f"a CUDA graph needs a CUDA device: this step runs on {device}")
    variant = Variant.from_spec(parameters["variant"], parameters["variant_spec"])
    require_supported(parameters, variant, device)
    torch.manual_seed(0)
    with torch.device(device):
        config = TNPConfig(**parameters["model"])
        model = TransformerNP(config, variant, getattr(torch, parameters["dtype"]))
        sizes = [(parameters["n_context"], parameters["n_target"])] * parameters["batch"]
        task = random_task(parameters, config, device, sizes)
        graph = parameters["cuda_graph"]
        step = TrainingStep(model, learning_rate=LEARNING_RATE, cuda_graph=graph)
    return lambda: step(task)


def host_ms(run: Run, device: torch.device) -> float:
    """Returns the milliseconds until `run` returns, called on an idle device."""
    synchronize(device)
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def _in_turn(
    runs: list[Run], device: torch.device, note: Callable[[str], None]
) -> list[tuple[list[float], list[float]]]:
    """Returns `host_ms` and `step_ms` of each run, one number for each round."""
    samples: list[tuple[list[float], list[float]]] = [([], []) for _ in runs]
    turns, order = list(zip(runs, samples, strict=True)), random.Random(0)
    for number in range(WARM_ROUNDS + ROUNDS if runs else 0):
        note(f"round {number}")
        order.shuffle(turns)  # nobody always follows the same one
        for run, (alone, loop) in turns:
            run()  # the previous form left its code and data in the processor's caches
            times = [host_ms(run, device) for _ in range(ALONE)]
            looped = _loop_ms(run, device)
            if number >= WARM_ROUNDS:
                alone.append(statistics.median(times))
                loop.append(looped)
    return samples


def _loop_ms(run: Run, device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(LOOP):
        run()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3 / LOOP
