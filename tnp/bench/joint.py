"""Times a model with a buffer: joint samples through it and anew, and its training step.

Forms, which take turns in one process:

    drawn         one target of a joint sample of all targets, through the buffer
    drawn_anew    one target whose context is encoded for it alone: `sample_jointly` without the
                  buffer, over n_context + n_target // 2 points, the mean of what the targets see
    trained       a training step of the model
    trained_plain a training step of the model without a buffer

A call of `drawn` is a whole sample with its encodings and its capture. Its time is divided by the
number of targets. A call of another form runs it `IN_A_ROW` times on an idle device.
"""

import time
from dataclasses import replace
from functools import partial

import torch

from tnp.bench.evidence import Code, packages
from tnp.bench.outcome import JOINT_FORMS, of_form
from tnp.bench.policy import Policy
from tnp.bench.predictions import IN_A_ROW, Run, in_a_row
from tnp.bench.provenance import Conditions
from tnp.bench.sampled import measured_columns, sample_rows
from tnp.bench.statistics import summarize
from tnp.bench.steps import LEARNING_RATE, random_task, require_supported
from tnp.bench.timing import first_call, measure_interleaved
from tnp.experiment.kernel_code import launches
from tnp.model.config import TNPConfig
from tnp.model.transformer_np import TransformerNP
from tnp.model.variants import Variant
from tnp.train.step import TrainingStep


def measure_joint(parameters: dict, started: float) -> dict[str, list[dict[str, object]]]:
    """Returns tables "predictions", "samples" and "code" of one configuration, a row a form.

    Args:
        parameters: as for `tnp.bench.predictions.measure_predictions`; `model` has a buffer.
        started: `time.perf_counter()` when the process began; `setup_s` counts from there.

    Raises:
        Unsupported: this device cannot run the variant.
    """
    device = torch.device(parameters["device"])
    variant = Variant.from_spec(parameters["variant"], parameters["variant_spec"])
    require_supported(parameters, variant, device)
    calls, notes = _calls(parameters, variant, device)
    setup_s = time.perf_counter() - started

    code = Code(packages=packages(), definitions=parameters.get("definitions", {}))
    with launches() as code.kernels:
        compile_s = {form: first_call(call, device) for form, (call, _) in calls.items()}
    policy = Policy.from_parameters(parameters["timing"])
    with Conditions(device.type) as conditions:
        contenders = [[call] for call, _ in calls.values()]
        measurements = measure_interleaved(contenders, device, policy)
    rows, samples = [], []
    for form, measurement in zip(calls, measurements, strict=True):
        measurement = measurement.of_each(calls[form][1])
        row = of_form(parameters, form) | {"kernels_hash": code.kernels_hash, "status": "ok"}
        row |= {"reason": "; ".join(filter(None, (notes.get(form), measurement.note)))}
        row |= summarize(measurement.samples_ms, "time_ms")
        row |= measured_columns(measurement, conditions)
        row |= {"setup_s": setup_s, "compile_s": compile_s[form], "max_relative_error": None}
        rows.append(row)
        samples += sample_rows(row, "prediction", measurement, conditions)
    return {"predictions": rows, "samples": samples, "code": code.rows()}


def _calls(
    parameters: dict, variant: Variant, device: torch.device
) -> tuple[dict[str, tuple[Run, int]], dict[str, str]]:
    """Returns {form: (a call, how often it does the timed work)}, and notes for some forms."""
    torch.manual_seed(0)
    on_cuda = device.type == "cuda"
    n_context, n_target = parameters["n_context"], parameters["n_target"]
    dtype = getattr(torch, parameters["dtype"])
    with torch.device(device):
        config = TNPConfig(**parameters["model"])
        model, plain = (
            TransformerNP(one, variant, dtype) for one in (config, replace(config, buffer=None))
        )
        steps = [
            TrainingStep(one, learning_rate=LEARNING_RATE, cuda_graph=on_cuda)
            for one in (model, plain)
        ]
    n_seen = n_context + n_target // 2
    task, longer = (
        random_task(parameters, config, device, [(n, n_target)] * parameters["batch"])
        for n in (n_context, n_seen)
    )
    x = longer.x_target[:, :1]
    in_a_row_of = {
        "drawn_anew": lambda: model.sample_jointly(longer.context, x, buffer=False),
        "trained": lambda: steps[0](task),
        "trained_plain": lambda: steps[1](task),
    }
    calls = {form: (in_a_row(run, device), IN_A_ROW) for form, run in in_a_row_of.items()}
    sample = partial(model.sample_jointly, task.context, task.x_target, cuda_graph=on_cuda)
    calls["drawn"] = sample, n_target
    notes = {"drawn_anew": f"{IN_A_ROW} targets over {n_seen:,} points each were timed"}
    return {form: calls[form] for form in JOINT_FORMS}, notes
