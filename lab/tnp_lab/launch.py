"""Launches compiled CUDA C++ on PyTorch's current stream, through cuda-core."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

from torch import Tensor

from tnp.dispatch import launcher
from tnp_lab.compile_job import CudaJob
from tnp_lab.nvrtc import ARCHITECTURES, Source, cached

Launch = Callable[[tuple[int, ...], int, list], None]  # grid, threads of a block, arguments


class Bound(launcher.OtherLaunch):
    """Holds a kernel with all arguments but its tensors and floating-point numbers.

    The kernel's arguments are, in this order: tensors, integers (long long), floating-point numbers
    (float). A call passes the tensors and the floating-point numbers. Tensors on the meta device
    launch nothing: a caller that compiles without a GPU watches the launches.

    Args:
        source: the kernel and its constants.
        capability: the compute capability to compile for, 90 for 9.0.
        grid: blocks in up to three dimensions.
        threads: the number of threads of a block.
        integers: sizes and strides, the same at every call.
        architecture: "sm_86", in place of the capability's own.
    """

    __slots__ = ("source", "architecture", "grid", "threads", "integers", "launch")

    def __init__(
        self,
        source: Source,
        capability: int,
        grid: tuple[int, ...],
        threads: int,
        *integers: int,
        architecture: str | None = None,
    ) -> None:
        self.source, self.grid, self.threads, self.integers = source, grid, threads, integers
        self.architecture = architecture or ARCHITECTURES.get(capability, f"sm_{capability}")
        self.launch: Launch | None = None

    @property
    def kernel(self) -> str:
        """Names the kernel, as "module:NAME"."""
        return self.source.kernel

    @property
    def key(self) -> tuple[Source, str]:
        """Identifies the machine code."""
        return self.source, self.architecture

    def compile(self) -> None:
        """Compiles into the user's cache."""
        cached(*self.key)

    def job(self, dtype: str) -> CudaJob:
        """Returns the job of the compile gate for tensors of `dtype`."""
        return CudaJob(*self.key, self.threads, dtype)

    def __call__(self, *arguments: Tensor | float) -> None:
        self.tell()
        if arguments[0].is_meta:
            return
        if self.launch is None:
            self.launch = loaded(self.source, self.architecture)
        tensors = [x for x in arguments if not isinstance(x, float)]
        numbers = map(ctypes.c_float, arguments[len(tensors) :])
        pointers = [x.data_ptr() for x in tensors]
        self.launch(self.grid, self.threads, [*pointers, *self.integers, *numbers])


@cache
def loaded(source: Source, architecture: str) -> Launch:
    """Returns a function that launches a kernel on the current stream of the current device."""
    import torch
    from cuda.core import LEGACY_DEFAULT_STREAM, LaunchConfig, ObjectCode, Stream, launch

    code = ObjectCode.from_cubin(cached(source, architecture))
    kernel = code.get_kernel(source.name)
    current, device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
    config = lru_cache(64)(lambda grid, threads: LaunchConfig(grid=grid, block=threads))

    @lru_cache(64)
    def stream(handle: int) -> Any:
        return Stream.from_handle(handle) if handle else LEGACY_DEFAULT_STREAM

    def run(grid: tuple[int, ...], threads: int, arguments: list) -> None:
        launch(stream(current(device())), config(grid, threads), kernel, *arguments)

    return run
