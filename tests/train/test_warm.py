"""Kernels compile side by side: nothing of a dry pass is left, and no error is lost."""

import json
import logging
import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest
import torch

from tnp.model.config import TNPConfig
from tnp.model.transformer_np import TransformerNP
from tnp.tasks.task import Task
from tnp.train import warm
from tnp.train.step import TrainingStep

CONFIG = TNPConfig(d_model=64, n_layers=2, n_heads=2, d_ff=128, n_components=2)

# A process of its own: in this one kernels are interpreted. Norms alone are ours, for few kernels.
IN_A_PROCESS = dedent("""
    import gc, json
    import torch, triton
    import triton.language as tl
    from triton import knobs
    from triton.runtime._async_compile import FutureKernel
    from tests.train.test_warm import CONFIG, task
    from tnp.dispatch import devices, launcher, plans
    from tnp.train import warm
    from tnp.model.transformer_np import TransformerNP
    from tnp.model.variants import Variant

    @triton.jit
    def broken(x):
        tl.static_assert(False, "as this test asks")

    hits, called = [], []
    knobs.compilation.listener = lambda cache_hit, **_: hits.append(cache_hit)
    model = TransformerNP(CONFIG, Variant("norms", rms_norm="fused"), torch.bfloat16)
    model.embed.output.requires_grad_(False)
    for module in model.modules():
        module.register_forward_hook(lambda *_: called.append("forward"))
    for x in model.parameters():
        if x.requires_grad:
            x.register_hook(lambda _: called.append("gradient"))
    before = [x.detach().clone() for x in model.parameters()]
    random = torch.get_rng_state()
    target, found, cached = devices.named("NVIDIA H200"), [], []
    with warm._no_driver(target):
        for _ in range(2):
            with warm.side_by_side(target) as one:
                warm._dry_step(model, [task()])
            found.append(one.n_kernels)
            cached.append(list(hits))
            hits.clear()
            for kernel in gc.get_objects():
                if isinstance(kernel, triton.JITFunction):
                    kernel.device_caches.clear()
        with warm.side_by_side(target) as one:
            launcher.Bound(broken, (1,))(torch.empty(16, device="meta"))
        left = [x for x in broken.device_caches[target][0].values() if isinstance(x, FutureKernel)]
        try:
            broken.warmup(torch.empty(16, device="meta"), grid=(1,))
        except triton.CompilationError as error:
            again = str(error)
    print(json.dumps({
        "found": found, "cached": cached, "failed": list(map(str, one.failed)), "left": len(left),
        "again": again, "called": called,
        "gradients": sum(x.grad is not None for x in model.parameters()),
        "same": all(map(torch.equal, before, model.parameters())),
        "random": torch.equal(random, torch.get_rng_state()),
        "plans": sum(len(known.by_key) for known in plans.of_operator.values()),
        "meta": devices.of_device(torch.device("meta")).kind,
    }))
""")


def task() -> Task:
    generator = torch.Generator().manual_seed(0)
    sizes = (2, 8, 1), (2, 8, 1), (2, 16, 1), (2, 16, 1)
    return Task(*(torch.randn(size, generator=generator) for size in sizes))


def outside(tmp_path: Path, *command: str) -> subprocess.CompletedProcess:
    environment = {key: x for key, x in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True
    )


def test_kernels_are_cached_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "in_a_process.py"  # Triton reads the source of kernels
    path.write_text(IN_A_PROCESS)
    child = outside(tmp_path, str(path))
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    n_kernels, again = found["found"]
    assert n_kernels == again > 2
    assert found["cached"] == [[False] * n_kernels, [True] * n_kernels]
    assert len(list((tmp_path / "cache").glob("*/*.cubin"))) == n_kernels
    # An error is told, and met again where the kernel is compiled again.
    assert len(found["failed"]) == 1 and "as this test asks" in found["failed"][0]
    assert found["left"] == 0 and "as this test asks" in found["again"]
    assert found["called"] == [] and found["gradients"] == found["plans"] == 0
    assert found["same"] and found["random"] and found["meta"] == "cpu"


def test_a_step_compiles_ahead_once(monkeypatch):
    given = []
    monkeypatch.setattr(warm, "launches_our_kernels", lambda model: True)
    monkeypatch.setattr(warm, "before_step", lambda *of_step: given.append(of_step))
    step = TrainingStep(TransformerNP(CONFIG, "auto"), learning_rate=1e-3)
    one = task()
    step(one)
    step(one)
    assert given == [(step.model, (one,), None)]


@pytest.mark.parametrize(
    ("error", "level"), [(RuntimeError("can't start new thread"), logging.WARNING),
                         (ValueError("bad input"), logging.DEBUG)],
)  # fmt: skip
def test_a_step_runs_where_nothing_can_be_compiled_ahead(monkeypatch, caplog, error, level):
    @contextmanager
    def refusing(target):
        raise error
        yield

    monkeypatch.setattr(warm, "launches_our_kernels", lambda model: True)
    monkeypatch.setattr(warm, "side_by_side", refusing)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    step = TrainingStep(TransformerNP(CONFIG, "auto"), learning_rate=1e-3)
    with caplog.at_level(logging.DEBUG, "tnp.train.warm"):
        assert step(task()).isfinite()
    assert [(x.levelno, str(error) in x.getMessage()) for x in caplog.records] == [(level, True)]


def test_nothing_is_compiled_ahead_for_whoever_watches(monkeypatch):
    model = TransformerNP(CONFIG, "auto")
    monkeypatch.setattr(warm, "side_by_side", lambda target: pytest.fail("a dry pass"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    with torch.device("cpu"):  # a mode
        assert warm.before_step(model, [task()]).n_kernels == 0
    with torch.nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert warm.before_step(model, [task()]).n_kernels == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpu", "Abacus 1"], "unknown GPU 'Abacus 1'"),
        (["--variant", "fastest"], "no variant 'fastest'"),
        ([], "--gpu 'NVIDIA H200'"),
    ],
)
def test_the_command_refuses_in_a_sentence(monkeypatch, capsys, options, said):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    here = bool(options) and options[0] != "--gpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here)
    monkeypatch.setattr(warm.devices, "of_device", lambda device: SimpleNamespace())
    sizes = ["--batch", "2", "--n-context", "8", "--n-target", "16"]
    assert warm.main([*sizes, *options]) == 2
    assert said in capsys.readouterr().err
