"""Benchmark of one training step: time, tokens/s, peak memory, operations, time per stage."""

import json
import math
import time

import torch

from tnp import plans, selection, targets
from tnp.bench.evidence import Code, packages
from tnp.bench.kernel_code import launches
from tnp.bench.memory import PeakMemory
from tnp.bench.outcome import Unsupported, key
from tnp.bench.policy import Policy
from tnp.bench.provenance import Conditions
from tnp.bench.sampled import measured_columns, sample_rows
from tnp.bench.stages import stage_rows
from tnp.bench.statistics import summarize
from tnp.bench.step_flops import step_attention_flops, step_matmul_flops
from tnp.bench.timing import Measurement, first_call, measure
from tnp.catalog import catalog, is_automatic
from tnp.contract import Call
from tnp.model import TNPConfig, TransformerNP
from tnp.step import TrainingStep
from tnp.step_graphs import N_EAGER_BEFORE_CAPTURE
from tnp.tasks import Task
from tnp.variants import Variant

STAGE_PASSES = 10
LEARNING_RATE = 1e-5  # real updates, too small to fit the one task into a degenerate density


def measure_step(parameters: dict, started: float) -> dict[str, list[dict[str, object]]]:
    """Tables "steps", "samples", "code" and, for an eager step, "stages" of one configuration.

    The peak memory is that of the steps after the first; for a captured step, of capture and
    replays, since a replay allocates nothing and lives in what the capture took.

    Args:
        parameters: the step key, `variant_spec`, `model`, `timing`, `device`, and
            `definitions`, the hashes of what the step runs, by name.
        started: `time.perf_counter()` when the process began; `setup_s` counts from there.

    Raises:
        Unsupported: this device cannot run the variant.
        RuntimeError: the loss is not finite after timing.
    """
    device = torch.device(parameters["device"])
    dtype = getattr(torch, parameters["dtype"])
    variant = Variant.from_spec(parameters["variant"], parameters["variant_spec"])
    _require_step_supported(parameters, variant, device)
    memory = PeakMemory(device)
    policy = Policy.from_parameters(parameters["timing"])

    torch.manual_seed(0)
    with torch.device(device):
        config = TNPConfig(**parameters["model"])
        model = TransformerNP(config, variant, dtype, parameters["checkpoint"])
        task = random_task(parameters, config, device)
        step = TrainingStep(
            model,
            learning_rate=LEARNING_RATE,
            update=parameters["optimizer"],
            cuda_graph=parameters["cuda_graph"],
        )
    setup_s = time.perf_counter() - started

    loss = torch.zeros(())

    def run() -> None:
        nonlocal loss
        loss = step(task)

    code = Code(packages=packages(), definitions=parameters.get("definitions", {}))
    with launches() as code.kernels:
        compile_s = first_call(run, device)
    if parameters["cuda_graph"]:
        compile_s += sum(first_call(run, device) for _ in range(N_EAGER_BEFORE_CAPTURE - 1))
        memory.reset()
        compile_s += first_call(run, device)
    else:
        memory.reset()
    with Conditions(device.type) as conditions:
        measurement = measure([run], device, policy)
    peak_memory_bytes = memory.read()
    if not math.isfinite(loss.item()):
        raise RuntimeError(
            f"the loss is {loss.item()} after timing: a step that diverges is not timed"
        )

    row = (
        key("step", parameters)
        | {"status": "ok", "reason": measurement.note, "peak_memory_bytes": peak_memory_bytes}
        | _rates(parameters, variant, measurement)
        | measured_columns(measurement, conditions)
        | {"setup_s": setup_s, "compile_s": compile_s, "energy_j": _energy(measurement, conditions)}
        | {"choices": _choices(variant), "launch_config": _launch_config()}
        | {"kernels_hash": code.kernels_hash}
    )
    samples = sample_rows(parameters, "step", measurement, conditions)
    tables = {"steps": [row], "samples": samples, "code": code.rows()}
    if not (parameters["cuda_graph"] or variant.compile):
        n_passes = 1 if row["step_ms_p50"] > policy.long_step_s * 1e3 else STAGE_PASSES
        tables["stages"] = [
            key("stage", parameters) | stage for stage in stage_rows(step, task, device, n_passes)
        ]
    return tables


def random_task(parameters: dict, config: TNPConfig, device: torch.device) -> Task:
    """Normal inputs drawn on the device, a function of the replicate; never zeros."""
    generator = torch.Generator(device).manual_seed(parameters["replicate"])

    def normal(n_rows: int, dim: int) -> torch.Tensor:
        return torch.randn(parameters["batch"], n_rows, dim, device=device, generator=generator)

    n_context, n_target = parameters["n_context"], parameters["n_target"]
    return Task(
        x_context=normal(n_context, config.d_x),
        y_context=normal(n_context, config.d_y),
        x_target=normal(n_target, config.d_x),
        y_target=normal(n_target, config.d_y),
    )


def _energy(measurement: Measurement, conditions: Conditions) -> float | None:
    """Joules of one step."""
    sampling_s = measurement.ended_s[-1]
    power_w = conditions.power_w(measurement.began, measurement.began + sampling_s)
    return None if power_w is None else power_w * sampling_s / len(measurement.samples_ms)


def _require_step_supported(parameters: dict, variant: Variant, device: torch.device) -> None:
    if parameters["cuda_graph"] and device.type != "cuda":
        raise Unsupported(f"a CUDA graph needs a CUDA device: this step runs on {device}")
    model = parameters["model"] | {"d_ff_storage": variant.d_ff_storage}
    for family, name in variant.implementations().items():
        for operator in catalog().family(family):
            problem = operator.within(model, parameters)
            if problem is not None and not is_automatic(name):
                found = catalog().load(operator.name, name)
                wanted = found.gradients or operator.differentiated
                call = Call(problem, targets.of_device(device), wanted)
                reason = found.refuses(call)
                if reason is not None:
                    raise Unsupported(f"{operator.name} {name!r}: {reason}")


def _choices(variant: Variant) -> str | None:
    """What "auto" chose in this process, as JSON; None where the variant leaves it no choice."""
    automatic = any(map(is_automatic, variant.implementations().values()))
    return json.dumps(selection.choices()) if automatic else None


def _launch_config() -> str | None:
    """Kernels and configurations of every operation of ours, as JSON; None without any."""
    found = plans.launch_configs()
    return json.dumps(found) if found else None


def _rates(parameters: dict, variant: Variant, measurement: Measurement) -> dict[str, float | None]:
    """Statistics of the step and what follows from the median; `mfu` is left to the store."""
    size = [parameters[name] for name in ("batch", "n_context", "n_target")]
    batch, n_context, n_target = size
    flops, computed = (
        step_matmul_flops(parameters["model"], *size, skip_unread)
        + step_attention_flops(parameters["model"], *size, skip_unread)
        for skip_unread in (False, variant.skip_unread)
    )
    statistics = summarize(measurement.samples_ms, "step_ms")
    median_s = statistics["step_ms_p50"] / 1e3
    return statistics | {
        "tokens_per_s": batch * (n_context + n_target) / median_s,
        "flops": flops,
        "tflops": computed / median_s / 1e12,
    }
