"""Tests stages of a step in made-up profiles, and in a CPU's, whose operators stand for kernels."""

from collections.abc import Callable, Container

import pytest
import torch
from torch import fx
from torch.profiler import ProfilerActivity

from tests.bench.configurations import MODEL, step_parameters
from tnp.bench import stages
from tnp.bench.stage_marks import marking, stage_of_nodes, text
from tnp.bench.stages import Kernel, Mismatch, by_place, placed, rows
from tnp.bench.steps import random_task
from tnp.model.config import TNPConfig
from tnp.model.layers import Attention
from tnp.model.transformer_np import TransformerNP
from tnp.model.variants import Variant
from tnp.store.schemas import PROVENANCE, RUN, STEP_KEY, TABLES
from tnp.train.step import TrainingStep

CPU = torch.device("cpu")
FORWARD = ("attention", "forward")
BACKWARD = ("attention", "backward")
LOSS = ("loss", "forward")
OTHER = ("other", "forward")


def mark(ts: float, stage: str, pass_: str) -> dict:
    return {"cat": "user_annotation", "name": text(stage, pass_), "ts": ts, "dur": 1.0}


def kernel(ts: float, name: str, dur: float = 1.0, correlation: int = 0, cat="kernel") -> dict:
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"correlation": correlation}}


def launch(ts: float, correlation: int, cat: str = "cuda_runtime") -> dict:
    return {
        "cat": cat,
        "name": "launch",
        "ts": ts,
        "dur": 1.0,
        "args": {"correlation": correlation},
    }


def test_a_kernel_is_of_the_stage_marked_last_before_its_launch() -> None:
    """Kernels run long after their launches, beside other ranges and events without arguments."""
    events = [
        launch(5, 1),
        mark(10, *FORWARD),
        launch(12, 2),
        launch(14, 3, "cuda_driver"),
        {"cat": "user_annotation", "name": "ProfilerStep#1", "ts": 15, "dur": 90},
        mark(20, *BACKWARD),
        launch(22, 4),
        kernel(100, "cast", correlation=1),
        kernel(102, "norm", correlation=2),
        kernel(103, "memset", correlation=9, cat="gpu_memset"),
        kernel(104, "mm", correlation=3),
        kernel(106, "mm", correlation=4),
        kernel(108, "nobody's", correlation=7),
        {"ph": "M", "name": "process_name"},
    ]
    assert placed(events[::-1]) == [
        Kernel("cast", OTHER),
        Kernel("norm", FORWARD),
        Kernel("mm", FORWARD),
        Kernel("mm", BACKWARD),
        Kernel("nobody's", OTHER),
    ]


KERNELS = [Kernel("norm", FORWARD), Kernel("mm", FORWARD), Kernel("norm", BACKWARD)]


def replays(times: list[tuple[float, float, float]]) -> list[dict]:
    """Each a copy of the task and of the loss, and a memset ahead of the matmul."""
    events = []
    for start, (norm, mm, backward) in enumerate(times):
        names = [("copy", 0.5, "gpu_memcpy"), ("norm", norm, "kernel"), ("set", 0.25, "gpu_memset")]
        names += [("mm", mm, "kernel"), ("norm", backward, "kernel"), ("loss", 0.5, "gpu_memcpy")]
        events += [
            kernel(100 * start + i, name, dur, cat=cat) for i, (name, dur, cat) in enumerate(names)
        ]
    return events


def test_times_are_summed_by_stage_and_pass_of_each_step() -> None:
    first, second = by_place(replays([(1, 2, 4), (2, 3, 5)]), KERNELS, 2)
    assert first == {FORWARD: [1, 0.25, 2], BACKWARD: [4], OTHER: [0.5]}
    assert second == {FORWARD: [2, 0.25, 3], BACKWARD: [5], OTHER: [0.5, 0.5, 0.5]}
    found = {(r["stage"], r["pass"]): r for r in rows(replays([(1, 2, 4), (3, 4, 6)]), KERNELS, 2)}
    forward = found["attention", "forward"]
    assert forward["time_ms_p50"] == pytest.approx((3.25 + 7.25) / 2 / 1e3)
    assert (forward["n_kernels"], forward["source"]) == (3, "profiler")
    added = {name for name, _ in PROVENANCE + RUN + STEP_KEY}
    assert set(forward) | added == set(TABLES["stages"].names)
    total = sum(r["time_ms_mean"] for r in found.values())
    assert total == pytest.approx((7 + 13 + 2 * 1.25) / 2 / 1e3)


@pytest.mark.parametrize(
    "kernels, says",
    [
        (KERNELS[:2], "2 steps have 6 kernels and the same step with marks 2"),
        (
            [*KERNELS[:2], Kernel("gelu", BACKWARD)],
            "kernel 2 of a step is norm and with marks gelu",
        ),
        # The same kernels in another order.
        ([KERNELS[1], KERNELS[0], KERNELS[2]], "kernel 0 of a step is norm and with marks mm"),
        (None, "saw no kernel"),
    ],
)
def test_steps_of_other_kernels_have_no_stages(kernels: list[Kernel] | None, says: str) -> None:
    with pytest.raises(Mismatch, match=says):
        if kernels is None:
            by_place([], [], 1)
        else:
            by_place(replays([(1, 2, 4), (2, 3, 5)]), kernels, 2)


def test_a_profiler_that_fails_loses_no_step(monkeypatch, caplog) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUPTI is not there")

    monkeypatch.setattr(stages, "_profile", fail)
    step, task = tiny(Variant("sdpa_flash"))
    assert stages.stage_rows(step, task, 2) == []
    assert "stages are not recorded: RuntimeError: CUPTI is not there" in caplog.text


def node(target: torch._ops.OpOverload, module: str | None, **meta: object) -> fx.Node:
    """One that the compiler says is of a module of this class inside of the model."""
    made = fx.Graph().call_function(target)
    if module is not None:
        path = {"L['self']": ("L['self']", "tnp.model.transformer_np.TransformerNP")}
        made.meta["nn_module_stack"] = path | {"part": ("part", f"tnp.model.layers.{module}")}
    made.meta |= meta
    return made


def test_a_compiled_kernel_is_of_the_stage_that_most_of_its_nodes_are_of() -> None:
    aten = torch.ops.aten
    mul, view, add = aten.mul.Tensor, aten.view.default, aten.add.Tensor
    mlp, heads = node(mul, "MLP"), node(mul, "MixtureHeads")
    loss = node(mul, None, stack_trace="loss = mixture_nll(\n")
    gradients = node(add, None, stack_trace="Gradient addition node due to multiple use")
    assert stage_of_nodes([mlp, node(mul, "MLP"), heads]) == "mlp"
    assert stage_of_nodes([mlp, heads]) == "other"
    assert stage_of_nodes([mlp, *(node(view, "MixtureHeads") for _ in range(3))]) == "mlp"
    assert stage_of_nodes([mlp, gradients, gradients]) == "mlp"
    assert stage_of_nodes([gradients]) == stage_of_nodes([]) == "other"
    assert stage_of_nodes([loss]) == "loss"
    assert stage_of_nodes([node(mul, "TransformerNP")]) == "other"
    backward = node(mul, None, fwd_nn_module_stack={"a": ("a", Attention)})
    assert stage_of_nodes([backward]) == "attention"


# These operators stand for kernels on a CPU. Each of these operators calls none of the others.
PRODUCTS = ("aten::mm", "aten::bmm")


def tiny(variant: Variant, n_layers: int = 2, **options: bool) -> tuple[TrainingStep, object]:
    torch.manual_seed(0)
    config = TNPConfig(**MODEL | {"n_layers": n_layers})
    update = options.pop("update", True)
    model = TransformerNP(config, variant, torch.float32, **options)
    step = TrainingStep(model, learning_rate=1e-3, update=update)
    return step, random_task(step_parameters(), config, CPU, [(7, 5)] * 2)


def profiled(run: Callable[[], object], n_runs: int, names: Container[str]) -> list[dict]:
    """A CPU's profile, as if operators of these names each launched a kernel as it began."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profile:
        for _ in range(n_runs):
            run()
    ranges = [(event.name, event.time_range.start) for event in profile.events()]
    events = [{"cat": "user_annotation", "name": name, "ts": ts, "dur": 0.0} for name, ts in ranges]
    for i, (name, ts) in enumerate(each for each in ranges if each[0] in names):
        events += [launch(ts, i), kernel(ts, name, correlation=i)]
    return events


def launched(variant: Variant, names: Container[str], **options: bool) -> list[Kernel]:
    """Operators of these names in a marked step."""
    step, task = tiny(variant, **options)
    nll = step.nll
    with marking(step):
        step._run((task,))
        events = profiled(lambda: step._run((task,)), 1, names)
    assert step.nll == nll
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in step.model.modules())
    return placed(events)


def counted(kernels: list[Kernel]) -> dict[tuple[str, str], int]:
    places = [kernel.place for kernel in kernels]
    return {place: places.count(place) for place in places}


def matmuls(n_layers: int = 2) -> dict[tuple[str, str], int]:
    return {
        ("embed", "forward"): 2,
        ("attention", "forward"): 2 * n_layers,
        ("mlp", "forward"): 2 * n_layers,
        ("heads", "forward"): 2,
        ("embed", "backward"): 3,  # the inputs have no gradient
        ("attention", "backward"): 4 * n_layers,
        ("mlp", "backward"): 4 * n_layers,
        ("heads", "backward"): 4,
    }


# Each block takes Inductor some seconds.
@pytest.mark.parametrize(("compiled", "n_layers"), [(False, 2), (True, 1)])
def test_the_kernels_of_undisturbed_steps_have_the_places_of_marked_ones(
    monkeypatch, compiled: bool, n_layers: int
) -> None:
    """Runs `stage_rows` with a CPU's operators as kernels of 1 µs.

    No hook of a module runs in a compiled step: the compiler knows each kernel's module.
    """
    monkeypatch.setattr(stages, "_profile", lambda run, n, _: profiled(run, n, PRODUCTS))
    step, task = tiny(Variant("mine", compile=compiled), n_layers)
    loss = step(task)
    found = stages.stage_rows(step, task, 3)
    assert {(row["stage"], row["pass"]): row["n_kernels"] for row in found} == matmuls(n_layers)
    assert all(row["time_ms_p50"] == pytest.approx(row["n_kernels"] / 1e3) for row in found)
    assert step(task) < loss  # it trains on, without a mark


def test_operations_of_ours_have_the_places_of_their_modules() -> None:
    """One `autograd.Function` each, of which no gradient of PyTorch's knows the inside."""
    parts = ("attention", "embedding", "rms_norm", "projection", "mlp", "mixture_heads")
    ours = dict.fromkeys((*parts, "mixture_nll"), "fused")
    variant = Variant("mine", **ours, skip_unread=True, d_ff_storage=48)
    found = counted(launched(variant, ("aten::copy_",)))
    stages = ("embed", "attention", "mlp", "heads", "loss")
    both = {(stage, pass_) for stage in stages for pass_ in ("forward", "backward")}
    assert found.keys() == both | {("optimizer", "optimizer")}


def test_what_a_checkpoint_computes_again_is_backward_of_its_own_stage() -> None:
    found = counted(launched(Variant("mine"), PRODUCTS, checkpoint=True))
    again = {("attention", "backward"): 12, ("mlp", "backward"): 12}  # each once more
    assert found == matmuls() | again


def test_norms_the_loss_and_the_update_have_places() -> None:
    names = ("aten::rsqrt", "aten::_log_softmax", "aten::_fused_adamw_")
    found = launched(Variant("mine"), names)
    norms = {("attention", "forward"): 2, ("mlp", "forward"): 2, ("heads", "forward"): 1}
    assert counted([k for k in found if k.name == "aten::rsqrt"]) == norms
    assert counted([k for k in found if k.name == "aten::_log_softmax"]) == {LOSS: 1}
    assert {k.place for k in found if "adamw" in k.name} == {("optimizer", "optimizer")}
    without = launched(Variant("mine"), names, update=False)
    assert not [k for k in without if "adamw" in k.name]
