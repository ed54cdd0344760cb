"""CUDA C++ that is compiled on first use, for the GPU that is there.

A kernel is named "module:NAME", as Triton's are: "tnp.ops.softmax.one_pass:softmax_one_pass" is
that `extern "C"` function of tnp/ops/softmax/one_pass.cu. What is a constant to it, types, sizes of
tiles, numbers of templates, is defined on the compiler's command line. NVRTC compiles, NVIDIA's
compiler as a library, through cuda-core; where it is missing nvcc does. Compiled code is kept in
the user's cache, by what it was compiled of and with.

Planning imports nothing of NVIDIA's: `missing` is asked where something is to run.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import io
import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tnp.dispatch.spec import Reason
from tnp.util.atomic_files import replacing, user_cache
from tnp.util.extras import install

if TYPE_CHECKING:
    from torch import Tensor

# Headers of ours, whose names are in quotation marks.
CUDA_INCLUDE = re.compile(r'^\s*#include "(.+)"', re.MULTILINE)
ROOT = Path(__file__).resolve().parents[2]  # what sources name files of ours from
# By compute capability, those of GPUs whose code only they run with all that they can do.
ARCHITECTURES = {
    75: "sm_75", 80: "sm_80", 86: "sm_86", 89: "sm_89", 90: "sm_90a", 100: "sm_100a",
}  # fmt: skip
TYPES = {"bfloat16": "__nv_bfloat16", "float16": "__half", "float32": "float"}
# Packages that carry CUTLASS's headers, and where.
CUTLASS = (
    ("cutlass_library", "source", "include"),  # of nvidia-cutlass
    ("flashinfer", "data", "cutlass", "include"),
)
WARP = 32
SHARED_LIMIT = 48 * 1024  # of a block that does not ask for more

Constants = tuple[tuple[str, str | int], ...]


class CompilationError(RuntimeError):
    """A source does not compile; the message is the compiler's."""


# ------------------------------------------------------------------------------------- what is here


def missing_for_cute() -> Reason:
    """What is not installed that compiles and launches CuTe."""
    if cutlass() is None:
        return (
            "the headers of CUTLASS are not installed, which CuTe is part of: "
            f"{install('cute')} brings them"
        )
    if not shutil.which("nvcc"):
        return "nvcc is not here, which compiles what needs CUTLASS"
    return missing()


@cache
def cutlass() -> str | None:
    """The folder of CUTLASS's headers, of a wheel that carries them."""
    for package, *folders in CUTLASS:
        found = importlib.util.find_spec(package)
        for place in (found.submodule_search_locations or ()) if found else ():
            path = Path(place, *folders)
            if (path / "cute" / "tensor.hpp").is_file():
                return str(path)
    return None


@cache
def missing() -> Reason:
    """What is not installed that compiles and launches CUDA C++."""
    if not (_is_installed("cuda.core") and _is_installed("cuda.bindings")):
        return (
            "cuda-core is not installed, which compiles and launches CUDA C++: "
            f"{install('cuda')} brings it"
        )
    if not _nvrtc_is_here() and not shutil.which("nvcc"):
        return (
            "it is compiled on first use, and neither NVRTC (pip install nvidia-cuda-nvrtc) nor "
            "nvcc is here"
        )
    return None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is not there
        return False


@cache
def _nvrtc_is_here() -> bool:
    """With the headers of CUDA, which Triton brings for its own use."""
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        load_nvidia_dynamic_lib("nvrtc")
    except DynamicLibNotFoundError:
        return False
    return _headers() is not None


@cache
def _headers() -> Path | None:
    found = importlib.util.find_spec("triton")
    folders = found.submodule_search_locations if found else None
    path = Path(folders[0], "backends", "nvidia", "include") if folders else None
    return path if path and (path / "mma.h").is_file() else None


# -------------------------------------------------------------------------------------- compilation


@dataclass(frozen=True)
class Source:
    """What is compiled: a kernel, its constants by name, and where CUTLASS is if it needs that.

    With CUTLASS nvcc compiles: NVRTC takes as long, and makes code of every function of its headers
    (measured at 4.2.0).
    """

    kernel: str
    constants: Constants
    cutlass: str = ""

    @property
    def name(self) -> str:
        """Of the function."""
        return self.kernel.partition(":")[2]

    @property
    def path(self) -> Path:
        """The .cu file, which is there or `read` raises FileNotFoundError."""
        return ROOT.joinpath(*self.kernel.partition(":")[0].split(".")).with_suffix(".cu")

    def texts(self) -> Iterator[str]:
        """Of the file, and of each of ours that it includes, directly or not."""
        pending, seen = [self.path], set()
        while pending:
            path = pending.pop()
            if path not in seen:
                seen.add(path)
                text = path.read_text()
                pending += [ROOT / name for name in CUDA_INCLUDE.findall(text)]
                yield text


@dataclass(frozen=True)
class Compiled:
    """Machine code, what the compiler said (registers, spills), and how long it took."""

    cubin: bytes
    log: str
    seconds: float


def build(source: Source, architecture: str) -> Compiled:
    """Compile, whether it is in the cache or not.

    Args:
        source: see there.
        architecture: "sm_90a", also of a GPU that is not here.

    Raises:
        CompilationError: with the compiler's message.
    """
    start = time.perf_counter()
    by = _by_nvrtc if _nvrtc_is_here() and not source.cutlass else _by_nvcc
    try:
        cubin, log = by(source, architecture)
    except CompilationError as error:
        raise CompilationError(
            f"{source.path.name} does not compile for {architecture} with "
            f"{dict(source.constants)}: {error}"
        ) from None
    return Compiled(cubin, log, time.perf_counter() - start)


def _by_nvrtc(source: Source, architecture: str) -> tuple[bytes, str]:
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        name=str(source.path),
        arch=architecture,
        std="c++17",
        define_macro=[(name, str(value)) for name, value in source.constants],
        include_path=[str(ROOT), str(_headers())],
        ptxas_options="-v",
        no_cache=True,  # of NVRTC: what comes from there says nothing of registers
    )
    log = io.StringIO()
    try:
        found = Program(source.path.read_text(), "c++", options).compile("cubin", logs=log)
    except Exception as error:  # NVRTC's, whose classes are its bindings' own
        raise CompilationError(str(error)) from None
    return found.code, log.getvalue()


def _by_nvcc(source: Source, architecture: str) -> tuple[bytes, str]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.cubin")
        command = ["nvcc", "-cubin", "-arch", architecture, "-std=c++17", "-Xptxas", "-v"]
        command += [f"-D{name}={value}" for name, value in source.constants]
        command += [f"-I{each}" for each in filter(None, (ROOT, source.cutlass))]
        child = subprocess.run(
            [*command, "-o", str(out), str(source.path)], capture_output=True, text=True
        )
        if child.returncode:
            raise CompilationError(child.stderr.strip())
        return out.read_bytes(), child.stderr


def identity(source: Source, architecture: str) -> list[object]:
    """Returns all that decides what compiling gives: texts, constants, target and compiler."""
    said = [source.name, source.constants, architecture, _compiler(bool(source.cutlass))]
    said += source.texts()
    if source.cutlass:
        said.append(Path(source.cutlass, "cutlass", "version.h").read_text())
    return said


def cached(source: Source, architecture: str) -> bytes:
    """Machine code from the user's cache, or compiled and kept there."""
    said = json.dumps(identity(source, architecture))
    path = user_cache() / "cuda" / hashlib.sha256(said.encode()).hexdigest()[:32]
    path = path.with_suffix(".cubin")
    if not path.is_file():
        cubin = build(source, architecture).cubin
        with replacing(path) as new:
            new.write_bytes(cubin)
    return path.read_bytes()


@cache
def _compiler(of_cutlass: bool) -> str:
    """Which, and its version; of NVRTC, whose headers are Triton's, also Triton's."""
    if _nvrtc_is_here() and not of_cutlass:
        from cuda.bindings import nvrtc

        return f"nvrtc {nvrtc.nvrtcVersion()[1:]}, headers of triton {metadata.version('triton')}"
    return subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout


# ----------------------------------------------------------------------------------------- launches

Launch = Callable[[tuple[int, ...], int, list], None]  # grid, threads of a block, arguments
_watchers: list[Callable[[Bound], None]] = []


@contextmanager
def watched(note: Callable[[Bound], None]) -> Iterator[None]:
    """Inside, `note` is told of every launch."""
    _watchers.append(note)
    try:
        yield
    finally:
        _watchers.remove(note)


class Bound:
    """A kernel with all but its tensors and floating-point numbers decided.

    The kernel's arguments are, in this order: tensors, integers (long long), floating-point numbers
    (float). A call passes the tensors and the floating-point numbers. Of tensors on the meta device
    nothing is launched: whoever compiles without a GPU watches.

    Args:
        source: see there.
        capability: of the GPU that it is compiled for, 90 for 9.0.
        grid: blocks in up to three dimensions.
        threads: of a block.
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

    def __call__(self, *arguments: Tensor | float) -> None:
        for note in _watchers:
            note(self)
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
    """What launches a kernel on PyTorch's current stream of the current device."""
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


def constants(**named: str | int) -> Constants:
    """By name, in a fixed order."""
    return tuple(sorted(named.items()))


def resources(log: str) -> Mapping[str, int]:
    """What ptxas says of a kernel: registers, bytes of stack and of shared memory."""
    found = re.search(r"(\d+) bytes stack frame.*?Used (\d+) registers([^\n]*)", log, re.DOTALL)
    if found is None:
        raise CompilationError(f"ptxas said nothing: {log!r}")
    shared = re.search(r"(\d+) bytes smem", found[3])
    return {
        "registers": int(found[2]),
        "spill_bytes": int(found[1]),
        "shared_bytes": int(shared[1]) if shared else 0,
    }
