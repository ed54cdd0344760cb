"""Times one training step: time, tokens/s, peak memory, operations, stages."""

import json
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch

from tnp.bench.evidence import Code, packages
from tnp.bench.memory import PeakMemory
from tnp.bench.outcome import Rows, key
from tnp.bench.policy import Policy
from tnp.bench.provenance import Conditions
from tnp.bench.sampled import measured_columns, sample_rows
from tnp.bench.stages import stage_rows
from tnp.bench.statistics import summarize
from tnp.bench.step_flops import step_attention_flops, step_matmul_flops
from tnp.bench.timing import Measurement, first_call, measure
from tnp.dispatch import devices, plans, selection
from tnp.dispatch.registry import catalog, is_automatic
from tnp.dispatch.spec import Call
from tnp.experiment.failures import Unsupported
from tnp.experiment.kernel_code import launches
from tnp.model.buckets import Buckets
from tnp.model.config import TNPConfig
from tnp.model.transformer_np import TransformerNP
from tnp.model.variants import Variant
from tnp.tasks.sizes import Sizes, varying_sizes
from tnp.tasks.task import Task
from tnp.train.step import TrainingStep
from tnp.train.step_graphs import N_EAGER_BEFORE_CAPTURE

STAGE_PASSES = 10
N_VARYING = 64  # tasks of a stream whose sizes vary
LEARNING_RATE = 1e-5  # real updates, but too small to overfit the one task


def measure_step(
    parameters: dict, started: float, note: Callable[[Rows], None] = lambda tables: None
) -> Rows:
    """Returns tables "steps", "samples", "code" and, on a GPU, "stages" of one configuration.

    The peak memory is measured over the steps after the first. For a captured step it covers
    capture and replays: a replay allocates nothing and uses the memory of its capture. For a stream
    it covers all steps, since a stream captures a size when the size comes again.

    If a shape's sizes vary, a sample is the mean over a fixed stream of `N_VARYING` tasks. Sizes
    are drawn for each task, or for each sample of it. Buckets reach the largest size that may be
    drawn. A stream has no stages.

    Args:
        parameters: the step key, `variant_spec`, `model`, `timing`, `device`, and
            `definitions`, the hashes of the step's code by name; `vary` if sizes vary.
        started: `time.perf_counter()` when the process began; `setup_s` counts from there.
        note: is called with all tables but "stages" before the profiler, which may end the process.

    Raises:
        Unsupported: this device cannot run the variant.
        RuntimeError: the loss is not finite after timing.
    """
    device = torch.device(parameters["device"])
    dtype = getattr(torch, parameters["dtype"])
    variant = Variant.from_spec(parameters["variant"], parameters["variant_spec"])
    if parameters["cuda_graph"] and device.type != "cuda":
        raise Unsupported(f"a CUDA graph needs a CUDA device: this step runs on {device}")
    require_supported(parameters, variant, device)
    memory = PeakMemory(device)
    policy = Policy.from_parameters(parameters["timing"])

    torch.manual_seed(0)
    with torch.device(device):
        config = TNPConfig(**parameters["model"])
        model = TransformerNP(config, variant, dtype, parameters["checkpoint"])
        stream = _stream(parameters)
        tasks = [random_task(parameters, config, device, sizes) for sizes in stream]
        step = TrainingStep(
            model,
            learning_rate=LEARNING_RATE,
            update=parameters["optimizer"],
            cuda_graph=parameters["cuda_graph"],
            buckets=Buckets.of(parameters.get("vary")),
        )
    setup_s = time.perf_counter() - started

    loss = torch.zeros(())

    def run() -> None:
        nonlocal loss
        for task in tasks:
            loss = step(task)

    code = Code(packages=packages(), definitions=parameters.get("definitions", {}))
    with launches() as code.kernels:
        compile_s = first_call(run, device)
    if parameters["cuda_graph"]:
        compile_s += sum(first_call(run, device) for _ in range(N_EAGER_BEFORE_CAPTURE - 1))
    if len(tasks) == 1:
        memory.reset()
    if parameters["cuda_graph"]:
        compile_s += first_call(run, device)
    with Conditions(device.type) as conditions:
        measurement = measure([run], device, policy).of_each(len(tasks))
    peak_memory_bytes = memory.read()
    if not math.isfinite(loss.item()):
        raise RuntimeError(
            f"the loss is {loss.item()} after timing: a step that diverges is not timed"
        )

    row = (
        key("step", parameters)
        | {"status": "ok", "reason": measurement.note, "peak_memory_bytes": peak_memory_bytes}
        | _rates(parameters, variant, stream, measurement)
        | {"padded_share": _padded_share(step, tasks)}
        | measured_columns(measurement, conditions)
        | {"setup_s": setup_s, "compile_s": compile_s, "energy_j": _energy(measurement, conditions)}
        | {"choices": _choices(variant), "launch_config": _launch_config()}
        # The planner knows no precision of other packages: it does not import them.
        | {"kernels_hash": code.kernels_hash, "precision": _precision(variant)}
    )
    samples = sample_rows(parameters, "step", measurement, conditions)
    tables = {"steps": [row], "samples": samples, "code": code.rows()}
    if device.type == "cuda" and len(tasks) == 1:
        note(tables)
        n_passes = 1 if row["step_ms_p50"] > policy.long_step_s * 1e3 else STAGE_PASSES
        found = stage_rows(step, tasks[0], n_passes)
        tables["stages"] = [key("stage", parameters) | stage for stage in found]
    return tables


def _stream(parameters: dict) -> list[list[Sizes]]:
    """Returns context and target points of each sample of each task, of one task or of a stream."""
    batch = parameters["batch"]
    if "vary" not in parameters:
        return [[(parameters["n_context"], parameters["n_target"])] * batch]
    # Every run has the same sizes, so that two runs of a step differ by noise alone.
    seed, vary = 1, dict(parameters["vary"])
    each = vary.pop("each", "batch")
    if each == "batch":
        return [[varying_sizes(vary, seed, i)] * batch for i in range(N_VARYING)]
    numbers = range(N_VARYING * batch)
    sizes = [varying_sizes(vary, seed, i) for i in numbers]
    return [sizes[i : i + batch] for i in numbers[::batch]]


def _padded_share(step: TrainingStep, tasks: list[Task]) -> float:
    """Returns the share of rows outside attention that are padding."""
    points = sum(sum(task.count()) for task in tasks)
    return 1.0 - points / sum(step.n_rows(task) for task in tasks)


def random_task(
    parameters: dict, config: TNPConfig, device: torch.device, sizes: list[Sizes]
) -> Task:
    """Draws normal inputs of these sizes, a function of the replicate and never zero."""
    generator = torch.Generator().manual_seed(parameters["replicate"])
    n_context, n_target = (max(numbers) for numbers in zip(*sizes, strict=True))

    def normal(n_rows: int, dim: int) -> torch.Tensor:
        return torch.randn(len(sizes), n_rows, dim, device="cpu", generator=generator)

    task = Task(
        x_context=normal(n_context, config.d_x),
        y_context=normal(n_context, config.d_y),
        x_target=normal(n_target, config.d_x),
        y_target=normal(n_target, config.d_y),
    )
    if len(set(sizes)) > 1:
        numbers = torch.tensor(sizes, dtype=torch.int32, device="cpu")
        task = replace(task, context_lengths=numbers[:, 0], target_lengths=numbers[:, 1])
    return task.to(device)


def _energy(measurement: Measurement, conditions: Conditions) -> float | None:
    """Returns the joules of one step, or None."""
    sampling_s = measurement.ended_s[-1]
    power_w = conditions.power_w(measurement.began, measurement.began + sampling_s)
    n_steps = len(measurement.samples_ms) * measurement.n_launches
    return None if power_w is None else power_w * sampling_s / n_steps


def require_supported(parameters: dict, variant: Variant, device: torch.device) -> None:
    """Raises Unsupported if an implementation of the variant cannot train at these sizes."""
    storage = variant.storage(parameters["model"]["d_ff"])
    model = parameters["model"] | {"d_ff_storage": storage}
    for family, name in variant.implementations().items():
        for operator in catalog().family(family):
            problem = operator.within(model, parameters)
            if problem is not None and not is_automatic(name):
                if missing := catalog().listed(operator.name, name).missing:
                    raise Unsupported(f"{operator.name} {name!r}: {missing}")
                found = catalog().load(operator.name, name)
                wanted = found.gradients or operator.differentiated
                call = Call(problem, devices.of_device(device), wanted)
                reason = found.refuses(call)
                if reason is not None:
                    raise Unsupported(f"{operator.name} {name!r}: {reason}")


def _precision(variant: Variant) -> str:
    """Returns the number format of products in 8 bits, ours or another package's, or ""."""
    named = variant.implementations().items()
    found = (
        catalog().load(operator.name, name).precision
        for family, name in named
        if not is_automatic(name)
        for operator in catalog().family(family)
    )
    return next(filter(None, found), "")


def _choices(variant: Variant) -> str | None:
    """Returns the choices of "auto" in this process as JSON, or None without "auto"."""
    automatic = any(map(is_automatic, variant.implementations().values()))
    return json.dumps(selection.choices()) if automatic else None


def _launch_config() -> str | None:
    """Returns kernels and configurations of all our operations as JSON, or None without any."""
    found = plans.launch_configs()
    return json.dumps(found) if found else None


def _rates(
    parameters: dict, variant: Variant, stream: list[list[Sizes]], measurement: Measurement
) -> dict[str, float | None]:
    """Returns the statistics of the step and the rates of its median. The store adds `mfu`."""
    model, n_tasks = parameters["model"], len(stream)
    counted = Counter(size for sizes in stream for size in sizes)
    flops, computed = (
        sum(
            step_matmul_flops(model, n, *size, skip_unread)
            + step_attention_flops(model, n, *size, skip_unread)
            for size, n in counted.items()
        )
        / n_tasks
        for skip_unread in (False, variant.skip_unread)
    )
    points = sum(n * sum(size) for size, n in counted.items()) / n_tasks  # without padding
    statistics = summarize(measurement.samples_ms, "step_ms")
    median_s = statistics["step_ms_p50"] / 1e3
    n_steps = len(measurement.samples_ms) * measurement.n_launches
    return statistics | {
        "step_ms_wall": measurement.wall_s / n_steps * 1e3,
        "tokens_per_s": points / median_s,
        "flops": flops,
        "tflops": computed / median_s / 1e12,
    }
