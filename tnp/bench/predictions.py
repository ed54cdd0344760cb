"""Times predictions over one context: encoded anew for each, and encoded once.

Forms, which take turns in one process:

    anew       `predict` from the context, which encodes it
    encode     `encode` alone
    kept       `predict` from the result of `encode`
    replayed   `predict` from the result of `encode(…, cuda_graph=True)`
    bare       the graph that `replayed` replays, and nothing around it

A call makes `IN_A_ROW` runs of a form, as a user makes many predictions over one context. It begins
on an idle device, so that earlier forms leave no work in the queue.
"""

import time
from collections.abc import Callable

import torch

from tnp.bench.evidence import Code, packages
from tnp.bench.outcome import FORMS, of_form
from tnp.bench.policy import Policy
from tnp.bench.provenance import Conditions
from tnp.bench.sampled import measured_columns, sample_rows
from tnp.bench.statistics import summarize
from tnp.bench.steps import random_task, require_supported
from tnp.bench.timing import first_call, measure_interleaved, synchronize
from tnp.experiment.failures import Unsupported
from tnp.experiment.kernel_code import launches
from tnp.model.config import TNPConfig
from tnp.model.transformer_np import TransformerNP
from tnp.model.variants import Variant
from tnp.tasks.task import Task

IN_A_ROW = 20
# Allowed error in float32 of predictions from an encoding, as a share of the largest parameter.
MOST_ERROR = 1e-6
N_TO_REPLAY = 2  # predictions of a size before one is replayed: one launched, one captured
MAX_BYTES = 1 << 40  # of memory: all targets are predicted at once

Run = Callable[[], object]


def measure_predictions(parameters: dict, started: float) -> dict[str, list[dict[str, object]]]:
    """Returns tables "predictions", "samples" and "code" of one configuration, a row a form.

    Args:
        parameters: the key of its rows, `variant_spec`, `model`, `timing`, `device`, and
            `definitions`, the hashes of the code by name.
        started: `time.perf_counter()` when the process began; `setup_s` counts from there.

    Raises:
        Unsupported: this device cannot run the variant.
        RuntimeError: predictions from an encoding differ from those from the context.
    """
    device = torch.device(parameters["device"])
    variant = Variant.from_spec(parameters["variant"], parameters["variant_spec"])
    require_supported(parameters, variant, device)
    errors = _errors(parameters, variant, device)
    model, task = _model_and_task(parameters, variant, device, parameters["dtype"])
    setup_s = time.perf_counter() - started

    code = Code(packages=packages(), definitions=parameters.get("definitions", {}))
    runs = _launched(model, task)
    with launches() as code.kernels:
        compile_s = {form: first_call(run, device) for form, run in runs.items()}
    if device.type == "cuda":
        for form, (run, first_s) in _replayed(model, task, device).items():
            runs[form], compile_s[form] = run, first_s
    contenders = [[in_a_row(run, device)] for run in runs.values()]
    policy = Policy.from_parameters(parameters["timing"])
    with Conditions(device.type) as conditions:
        measurements = measure_interleaved(contenders, device, policy, IN_A_ROW)

    measured = dict(zip(runs, measurements, strict=True))
    rows, samples = [], []
    for form in FORMS:
        row = of_form(parameters, form) | {"kernels_hash": code.kernels_hash}
        if form in measured:
            row |= {"status": "ok", "reason": measured[form].note}
            row |= summarize(measured[form].samples_ms, "time_ms")
            row |= measured_columns(measured[form], conditions)
            row |= {"setup_s": setup_s, "compile_s": compile_s[form]}
            row |= {"max_relative_error": errors.get(form)}
            samples += sample_rows(row, "prediction", measured[form], conditions)
        else:
            row |= {"status": "unsupported", "reason": "a CUDA graph needs a CUDA device"}
        rows.append(row)
    return {"predictions": rows, "samples": samples, "code": code.rows()}


def _model_and_task(
    parameters: dict, variant: Variant, device: torch.device, dtype: str
) -> tuple[TransformerNP, Task]:
    """Returns a model and a task, with equal weights and inputs in every dtype."""
    torch.manual_seed(0)
    with torch.device(device):
        config = TNPConfig(**parameters["model"])
        model = TransformerNP(config, variant, getattr(torch, dtype))
    sizes = [(parameters["n_context"], parameters["n_target"])] * parameters["batch"]
    return model, random_task(parameters, config, device, sizes)


def _launched(model: TransformerNP, task: Task) -> dict[str, Run]:
    """Returns a function for each form launched from Python: it predicts once, or encodes."""
    kept = model.encode(task.context)
    return {
        "anew": lambda: model.predict(task.context, task.x_target, MAX_BYTES),
        "encode": lambda: model.encode(task.context),
        "kept": lambda: model.predict(kept, task.x_target, MAX_BYTES),
    }


def _replayed(
    model: TransformerNP, task: Task, device: torch.device
) -> dict[str, tuple[Run, float]]:
    """Returns a function for each form that replays a graph, and the seconds that came before."""
    encoding = model.encode(task.context, cuda_graph=True)

    def predict() -> object:
        return model.predict(encoding, task.x_target, MAX_BYTES)

    until_replayed_s = sum(first_call(predict, device) for _ in range(N_TO_REPLAY))
    bare = encoding.graphs.replay(model.prepared_x(task.x_target).shape)
    return {"replayed": (predict, until_replayed_s), "bare": (bare, first_call(bare, device))}


def in_a_row(run: Run, device: torch.device) -> Callable[[], None]:
    """Returns a function that makes `IN_A_ROW` runs on an idle device."""

    def call() -> None:
        synchronize(device)
        for _ in range(IN_A_ROW):
            run()

    return call


@torch.no_grad()
def _errors(parameters: dict, variant: Variant, device: torch.device) -> dict[str, float]:
    """Returns how far mixture parameters from an encoding differ from freshly encoded ones.

    It computes in float32 with equal weights: the largest difference over the largest parameter.
    The result is {} if the variant's kernels do not take float32. Raises RuntimeError past
    `MOST_ERROR`.
    """
    try:
        require_supported(parameters | {"dtype": "float32"}, variant, device)
    except Unsupported:
        return {}
    model, task = _model_and_task(parameters, variant, device, "float32")
    x = model.prepared_x(task.x_target)
    anew = model.encode(task.context).decode(model, x)
    encodings = {"kept": model.encode(task.context)}
    if device.type == "cuda":
        encodings["replayed"] = model.encode(task.context, cuda_graph=True)
        for _ in range(N_TO_REPLAY):
            encodings["replayed"].decode(model, x)
    found = {}
    for form, encoding in encodings.items():
        error = (encoding.decode(model, x) - anew).abs().max() / anew.abs().max()
        found[form] = error.item()
        if not found[form] <= MOST_ERROR:
            raise RuntimeError(
                f"predictions that are {form} are off by {found[form]:.2g} of the largest parameter"
            )
    return found
