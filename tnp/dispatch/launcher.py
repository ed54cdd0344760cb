"""Launches compiled Triton kernels without Triton's argument binding.

A plan's launch ends here. A `Bound` is a kernel with a fixed grid, integers and constants. Its
first call goes through Triton, which specializes, compiles and loads the kernel. Later calls pass
the same arguments straight to the compiled kernel's launcher in C. So a plan must fix all that
Triton specializes for: the type and alignment of each tensor, and the value of each integer.

Every call goes through Triton, which is slower, inside `watched`, under a profiler's launch hooks,
and with a version of Triton that is not in `KNOWN_LAUNCHERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import triton
from torch import Tensor
from triton import knobs

from tnp.dispatch.private import KNOWN_LAUNCHERS, TO_HOST, launcher_in_c, tensor_map_encoder

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
# The number of tensor maps that are kept for one argument, by address.
MAPS_KEPT = 256

_watchers = 0
_compiled: list[set[Any]] = []  # the compiled kernels, for each open `compiled_only`


@contextmanager
def watched() -> Iterator[None]:
    """Sends every launch inside through Triton, so that a replaced method of Triton sees it."""
    global _watchers
    _watchers += 1
    try:
        yield
    finally:
        _watchers -= 1


@contextmanager
def compiled_only() -> Iterator[set[Any]]:
    """Makes a launch on tensors of the meta device compile its kernel, and launch nothing.

    Launches on other tensors are unchanged. Yields the set of compiled kernels.
    """
    kernels: set[Any] = set()
    _compiled.append(kernels)
    try:
        yield kernels
    finally:
        _compiled.remove(kernels)


class OtherLaunch:
    """Launches a kernel that Triton does not compile. Each call begins with `tell`."""

    __slots__ = ()
    kernel: str  # "module:NAME"
    key: Hashable  # decides the machine code

    def compile(self) -> None:
        """Compiles the kernel, so that a later launch finds it."""
        raise NotImplementedError

    def job(self, dtype: str) -> Any:
        """Returns what `tnp.gates.compile` compiles for tensors of `dtype`; see its `Job`."""
        raise NotImplementedError

    def tell(self) -> None:
        """Passes this launch to the functions of `watched_others`."""
        for note in _notes:
            note(self)


_notes: list[Callable[[OtherLaunch], None]] = []


@contextmanager
def watched_others(note: Callable[[OtherLaunch], None]) -> Iterator[None]:
    """Calls `note` with every launch inside of a kernel that Triton does not compile."""
    _notes.append(note)
    try:
        yield
    finally:
        _notes.remove(note)


class Bound:
    """Binds a kernel to everything but its tensors and floating-point numbers.

    The kernel's arguments are, in this order: tensors read by TMA, other tensors, integers,
    floating-point numbers, constants. A call passes the tensors and the floating-point numbers.

    Args:
        kernel: a function decorated with `triton.jit` or `gluon.jit`.
        grid: programs in up to three dimensions.
        integers: sizes and strides, the same at every call.
        maps: for each tensor read by TMA, the function that makes its descriptor.
        constexprs: constants and launch options, by name.
    """

    __slots__ = ("kernel", "grid", "integers", "maps", "constexprs", "direct")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        *integers: int,
        maps: tuple[Callable[[Tensor], Any], ...] = (),
        **constexprs: Any,
    ) -> None:
        self.kernel, self.grid, self.integers = kernel, grid, integers
        self.maps, self.constexprs = maps, constexprs
        self.direct: Callable[[tuple], None] | None = None

    def __call__(self, *arguments: Tensor | float) -> None:
        direct = self.direct
        if direct is not None and not _observed():
            direct(arguments)
            return
        n_tensors = sum(isinstance(x, Tensor) for x in arguments)
        tensors, floats = arguments[:n_tensors], arguments[n_tensors:]
        descriptors = [make(x) for make, x in zip(self.maps, tensors, strict=False)]
        given = *descriptors, *tensors[len(descriptors) :], *self.integers, *floats
        if _compiled and tensors[0].is_meta:
            if not self.kernel.pre_run_hooks:  # its hooks must see launches only
                self.kernel.warmup(*given, grid=self.grid, **self.constexprs)
                _compiled[-1].add(self.kernel)
            return
        compiled = self.kernel[self.grid](*given, **self.constexprs)
        is_known = compiled is not None and VERSION in KNOWN_LAUNCHERS
        if direct is None and is_known and not _observed():
            self.direct = _direct(self, compiled, descriptors, n_tensors)


def _observed() -> bool:
    """Returns whether a profiler's launch hooks or `watched` are active."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook  # usually chains of hooks
    return bool(_watchers or getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _direct(
    bound: Bound, compiled: Any, descriptors: list[Any], n_tensors: int
) -> Callable[[tuple], None] | None:
    """Returns a function that launches `compiled` without Triton, or None if only Triton can."""
    from tnp.dispatch.private import CudaLauncher

    run = compiled.run
    metas = getattr(compiled.metadata, "tensordesc_meta", None) or []
    n_maps = len(descriptors)
    lowered = sum(not meta["fp4_padded"] for meta in metas)  # lowered to TMA, and not in 4 bits
    plain = all(getattr(x, "padding", "zero") == "zero" and not _rounded(x) for x in descriptors)
    scratch = getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1)
    if not isinstance(run, CudaLauncher) or scratch or lowered != n_maps or not plain:
        return None
    if bound.kernel.pre_run_hooks or knobs.runtime.debug or knobs.compilation.instrumentation_mode:
        return None
    launch = run.launch
    if n_maps:  # a wrapper that makes tensor maps: take the launcher inside
        launch = launcher_in_c(launch)
    driver = triton.runtime.driver.active
    current_stream, device = driver.get_current_stream, driver.get_current_device()
    grid = (*bound.grid, 1, 1)[:3]
    fixed = compiled.function, run.launch_cooperative_grid, run.launch_pdl
    as_one = VERSION != (3, 6)  # whether the arguments are passed as one sequence
    if as_one:  # metadata, no hooks, no scratch memory, types
        types = run.arg_annotations, run.kernel_signature
        fixed += (compiled.packed_metadata, None, None, None, None, None, *types)
    else:  # no scratch memory, metadata, no hooks
        fixed += None, None, compiled.packed_metadata, None, None, None
    maps = [_tensor_maps(one, meta) for one, meta in zip(descriptors, metas, strict=True)]
    integers = bound.integers
    # The launcher skips constants, but counts them.
    constants = (None,) * sum(parameter.is_constexpr for parameter in bound.kernel.params)

    def direct(arguments: tuple, keep: Any = compiled) -> None:
        tensors = [x.data_ptr() for x in arguments[:n_tensors]]
        if maps:
            described: list[Any] = []
            for (encode, sizes), address in zip(maps, tensors, strict=False):
                described += encode(address), *sizes
            tensors = described + tensors[n_maps:]
        found = [*tensors, *integers, *arguments[n_tensors:], *constants]
        if as_one:
            launch(*grid, current_stream(device), *fixed, found)
        else:
            launch(*grid, current_stream(device), *fixed, *found)

    return direct


def _rounded(descriptor: Any) -> bool:
    """Returns whether TMA rounds float32 to TF32 (an option of later versions of Triton)."""
    return bool(getattr(descriptor, "round_f32_to_tf32", False))


def _tensor_maps(descriptor: Any, meta: dict[str, Any]) -> tuple[Callable[[int], Any], tuple]:
    """Returns a function from address to tensor map, and the arguments that follow a map."""
    encode = tensor_map_encoder()
    shape, strides = list(descriptor.shape), list(descriptor.strides)
    kind = TO_HOST.get(meta["elem_type"], meta["elem_type"])
    about = meta["swizzle"], meta["elem_size"], kind, meta["block_size"]

    @lru_cache(MAPS_KEPT)
    def at(address: int) -> Any:
        return encode(address, *about, shape, strides, 0)

    return at, (*shape, *strides)
