"""Compiles kernels in parallel, before launches would compile them one by one.

    python -m tnp.train.warm --batch 64 --n-context 64 --n-target 500

fills the caches of Triton and of CUDA C++ for training steps of these sizes. `TrainingStep` does
the same in its first call. The gates of operators do it before their first case.

A dry pass runs the same calls on tensors of the meta device, which have no memory and no values.
Plans are made as for the GPU, and each launch hands its kernel to a pool of threads. Triton's
compiler and ptxas run outside Python's lock. A dry pass of a step runs on a model of its own: it
reads and writes nothing of the user's. A kernel that the pool fails to compile is compiled again by
its launch, which raises the error.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tnp.dispatch import devices
from tnp.dispatch.devices import Target
from tnp.dispatch.spec import OWN
from tnp.model.config import TNPConfig
from tnp.util.cli import Parser, end_with, option, size

if TYPE_CHECKING:
    from tnp.model.packing import Capacity
    from tnp.model.transformer_np import TransformerNP
    from tnp.tasks.task import Task

log = logging.getLogger("tnp.train.warm")
# Sizes of a model that its kernels depend on.
SIZES = tuple(field for field in fields(TNPConfig) if isinstance(field.default, int))


@dataclass
class Found:
    """Holds the results of `side_by_side`, complete when the block has ended."""

    n_kernels: int = 0
    failed: tuple[BaseException, ...] = ()


class _Pool(ThreadPoolExecutor):
    """Runs a thread for each usable core. `others` holds jobs that are not Triton's, by key."""

    def __init__(self) -> None:
        super().__init__(len(os.sched_getaffinity(0)), thread_name_prefix="tnp.train.warm")
        self.others: dict[Hashable, Future] = {}

    def submit(self, function: Callable, /, *arguments: Any) -> Future:
        return super().submit(_run, function, *arguments)


def _run(function: Callable, *arguments: Any) -> Any:
    """Compiles a kernel, and its launcher if Triton writes one for each signature (3.6)."""
    from triton.runtime import driver

    made = function(*arguments)
    launcher = getattr(driver.active, "launcher_cls", None)
    if launcher is not None and hasattr(made, "metadata"):
        with suppress(Exception):  # the launch raises the error again
            launcher(made.src, made.metadata)
    return made


@contextmanager
def side_by_side(target: Target) -> Iterator[Found]:
    """Compiles the kernels of launches on the meta device in a pool of threads.

    Tensors of the meta device stand for tensors of `target`, which is the current device. The block
    ends when all kernels are compiled. Kernels that do not compile stand in `failed`, and their
    launches compile again.

    Raises:
        RuntimeError: Triton compiles in another pool already.
    """
    from tnp.dispatch import plans
    from tnp.dispatch.launcher import OtherLaunch, compiled_only, watched_others
    from tnp.dispatch.private import AsyncCompileMode

    found = Found()

    def note(launch: OtherLaunch) -> None:
        if launch.key not in pool.others:
            pool.others[launch.key] = pool.submit(launch.compile)

    with (
        _Pool() as pool,
        devices.on_meta(target),
        plans.forgotten_after(),
        watched_others(note),
        compiled_only() as kernels,
    ):
        mode = AsyncCompileMode(pool, ignore_errors=True)
        try:
            with mode:
                yield found
        finally:
            _drop_failed(kernels)
    futures = [*mode.raw_futures, *pool.others.values()]
    errors = (future.exception() for future in futures)
    found.n_kernels = len(futures)
    found.failed = tuple(error for error in errors if error is not None)


def _drop_failed(kernels: Iterable[Any]) -> None:
    """Removes kernels that did not compile from Triton's caches, so that a launch tries again."""
    from tnp.dispatch.private import FutureKernel

    for kernel in kernels:
        for known, *_ in list(kernel.device_caches.values()):
            for key, compiled in list(known.items()):
                if isinstance(compiled, FutureKernel):
                    del known[key]


# ------------------------------------------------------------------------------- a training step


def before_step(
    model: TransformerNP, tasks: Sequence[Task], capacity: Capacity | None = None
) -> Found:
    """Compiles what a training step of `model` on `tasks` launches, on the GPU of its parameters.

    It never raises. Errors are logged, and the step then compiles one kernel after another.
    """
    import torch

    device = next(model.parameters()).device
    found = Found()
    try:
        if _is_watched():
            log.info("kernels are compiled one after another: somebody watches what PyTorch runs")
            return found
        with torch.cuda.device(device), side_by_side(devices.of_device(device)) as found:
            _dry_step(model, tasks, capacity)
    except ValueError as error:  # bad input, which the step refuses in the same words
        log.debug("no dry pass: %s", error)
    except Exception as error:
        log.warning("kernels are compiled one after another: %s: %s", type(error).__name__, error)
    return found


def _is_watched() -> bool:
    """Returns whether modes or global hooks would see the calls of a dry pass."""
    from tnp.dispatch.private import has_global_hooks, in_function_mode, n_dispatch_modes

    return bool(n_dispatch_modes() or in_function_mode() or has_global_hooks())


def _dry_step(
    model: TransformerNP, tasks: Sequence[Task], capacity: Capacity | None = None
) -> None:
    """Runs the loss and its gradient on the meta device, by a model like `model`, without hooks.

    Recomputed blocks launch the same kernels, so the dry pass keeps all activations.
    """
    import torch

    from tnp.dispatch.private import DisableAutocast
    from tnp.model.transformer_np import TransformerNP

    variant = replace(model.variant, recompute_above=None)
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        dry = TransformerNP(model.config, variant, model.compute_dtype)
    wanted = {name: x.requires_grad for name, x in model.named_parameters()}
    for name, parameter in dry.named_parameters():
        parameter.requires_grad_(wanted.get(name, True))
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(DisableAutocast())
        # The backward pass runs on this thread, in which Triton's mode is active.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(torch.autograd.graph.disable_saved_tensors_hooks("this is a dry pass"))
        for task in tasks:
            tensors = (x if x is None else x.detach().to("meta") for x in task)
            dry.nll(*tensors, capacity).backward()


def launches_our_kernels(model: TransformerNP) -> bool:
    """Returns whether a step of `model` launches our kernels, which must be compiled."""
    from tnp.util.extras import triton_is_installed

    on_gpu = next(model.parameters()).is_cuda
    return on_gpu and triton_is_installed() and model.variant.role() == OWN


# ---------------------------------------------------------------------------------- command line


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns exit code 0, 1 if a kernel does not compile, or 2 without a GPU or for bad sizes."""
    asked = _parser().parse_args(arguments)
    import torch

    from tnp.model.transformer_np import TransformerNP
    from tnp.tasks.task import Task

    if os.environ.get("TRITON_INTERPRET") == "1":
        return _refuse("kernels are interpreted, not compiled: unset TRITON_INTERPRET")
    if asked.gpu is None and not torch.cuda.is_available():
        return _refuse("no GPU is here: name the one to compile for, as in --gpu 'NVIDIA H200'")
    started = time.perf_counter()
    try:
        config = TNPConfig(**{field.name: getattr(asked, field.name) for field in SIZES})
        here = asked.gpu is None
        target = devices.of_device(torch.device("cuda", 0)) if here else devices.named(asked.gpu)
        with torch.device("meta"):
            model = TransformerNP(config, asked.variant, getattr(torch, asked.dtype))
            batch, m, n = asked.batch, asked.n_context, asked.n_target
            x, y = (torch.empty(batch, m + n, width) for width in (config.d_x, config.d_y))
            task = Task(x[:, :m], y[:, :m], x[:, m:], y[:, m:])
    except ValueError as error:
        return _refuse(str(error))
    try:
        with ExitStack() as stack:
            if not here:
                stack.enter_context(_no_driver(target))
            found = stack.enter_context(side_by_side(target))
            _dry_step(model, [task])
    except (RuntimeError, ValueError) as error:  # an operator does not run there, with the reason
        return _refuse(str(error))
    for error in found.failed:
        print(f"python -m tnp.train.warm: {error}", file=sys.stderr)
    taken = time.perf_counter() - started
    print(f"{found.n_kernels} kernels for {target.model} are in the cache, after {taken:.1f} s")
    return 1 if found.failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m tnp.train.warm",
        description="Compile the kernels of a training step ahead, into Triton's cache.",
    )
    for name in ("batch", "n_context", "n_target"):
        parser.add_argument(option(name), type=size, required=True)
    for field in SIZES:
        parser.add_argument(option(field.name), type=size, default=field.default)
    parser.add_argument("--variant", default="auto", help="the model's variant (auto)")
    dtypes = ("bfloat16", "float16", "float32")
    parser.add_argument("--dtype", default=dtypes[0], choices=dtypes, help="compute_dtype")
    parser.add_argument("--gpu", help="compile for this GPU, which need not be here")
    return parser


def _refuse(sentence: str) -> int:
    print(f"python -m tnp.train.warm: {sentence}", file=sys.stderr)
    return 2


@contextmanager
def _no_driver(target: Target) -> Iterator[None]:
    """Lets Triton compile for `target` inside the block without asking a driver."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    before = driver._active
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", target.capability, 32),
            get_current_device=lambda: target,  # Triton keeps compiled kernels by device
            get_current_stream=lambda device: None,
        )
    )
    try:
        yield
    finally:
        driver.set_active(before)


if __name__ == "__main__":
    end_with(main)
