"""Compiles CUDA C++ on first use, for the GPU that is there.

A kernel is named "module:NAME", as Triton's are: "tnp_lab.softmax.one_pass:softmax_one_pass" is
that `extern "C"` function of tnp_lab/softmax/one_pass.cu. The compiler's command line defines its
constants: types, sizes of tiles, arguments of templates. NVRTC, NVIDIA's compiler as a library,
compiles through cuda-core. nvcc replaces it if it is missing. The user's cache keeps machine code
by a hash of its sources, constants, target and compiler.

Planning imports no package of NVIDIA's: only a call asks `missing`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from tnp.dispatch.spec import Reason
from tnp.util.atomic_files import replacing, user_cache
from tnp.util.extras import install
from tnp_lab.sources import INCLUDE

ROOT = Path(__file__).resolve().parents[1]  # paths of our headers are relative to it
# Compute capability → architecture, with the instructions that only this GPU has.
ARCHITECTURES = {
    75: "sm_75", 80: "sm_80", 86: "sm_86", 89: "sm_89", 90: "sm_90a", 100: "sm_100a",
}  # fmt: skip
TYPES = {"bfloat16": "__nv_bfloat16", "float16": "__half", "float32": "float"}
# Packages that carry CUTLASS's headers, and where.
CUTLASS = (
    ("cutlass_library", "source", "include"),  # from package nvidia-cutlass
    ("flashinfer", "data", "cutlass", "include"),
)
WARP = 32
SHARED_LIMIT = 48 * 1024  # the most bytes of a block that does not ask for more

Constants = tuple[tuple[str, str | int], ...]


class CompilationError(RuntimeError):
    """Says that a source does not compile, in the compiler's words."""


# ------------------------------------------------------------------------------------- what is here


def missing_for_cute() -> Reason:
    """Returns which package for compiling and launching CuTe is missing, or None."""
    if cutlass() is None:
        return f"CUTLASS's headers, with CuTe, are not installed: run {install('cute', 'lab')}"
    if not shutil.which("nvcc"):
        return "nvcc, which compiles sources with CUTLASS, is not here"
    return missing()


@cache
def cutlass() -> str | None:
    """Returns the folder of CUTLASS's headers in an installed package, or None."""
    for package, *folders in CUTLASS:
        found = importlib.util.find_spec(package)
        for place in (found.submodule_search_locations or ()) if found else ():
            path = Path(place, *folders)
            if (path / "cute" / "tensor.hpp").is_file():
                return str(path)
    return None


@cache
def missing() -> Reason:
    """Returns which package for compiling and launching CUDA C++ is missing, or None."""
    if not (_is_installed("cuda.core") and _is_installed("cuda.bindings")):
        return (
            "cuda-core, which compiles and launches CUDA C++, is not installed: "
            f"run {install('cuda', 'lab')}"
        )
    if not _nvrtc_is_here() and not shutil.which("nvcc"):
        return (
            "neither NVRTC (pip install nvidia-cuda-nvrtc) nor nvcc, which compile it on first "
            "use, is here"
        )
    return None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is not there
        return False


@cache
def _nvrtc_is_here() -> bool:
    """Returns whether NVRTC and CUDA's headers are here; Triton brings the headers."""
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
    """Holds a kernel to compile, its constants by name, and CUTLASS's folder if needed.

    nvcc compiles sources that include CUTLASS. NVRTC takes as long, and makes code of every
    function of the headers (measured at 4.2.0).
    """

    kernel: str
    constants: Constants
    cutlass: str = ""

    @property
    def name(self) -> str:
        """Names the function."""
        return self.kernel.partition(":")[2]

    @property
    def path(self) -> Path:
        """Returns the path of the .cu file."""
        return ROOT.joinpath(*self.kernel.partition(":")[0].split(".")).with_suffix(".cu")

    def texts(self) -> Iterator[str]:
        """Yields the text of the file, and of each header of ours that it includes."""
        pending, seen = [self.path], set()
        while pending:
            path = pending.pop()
            if path not in seen:
                seen.add(path)
                text = path.read_text()
                pending += [ROOT / name for name in INCLUDE.findall(text)]
                yield text


@dataclass(frozen=True)
class Compiled:
    """Holds machine code, the compiler's log (registers, spills), and the seconds it took."""

    cubin: bytes
    log: str
    seconds: float


def build(source: Source, architecture: str) -> Compiled:
    """Compiles a source, even if the result is in the cache.

    Args:
        source: the kernel and its constants.
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
        no_cache=True,  # results from NVRTC's cache have no log of registers
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
    """Returns everything that decides the result: texts, constants, target and compiler."""
    said = [source.name, source.constants, architecture, _compiler(bool(source.cutlass))]
    said += source.texts()
    if source.cutlass:
        said.append(Path(source.cutlass, "cutlass", "version.h").read_text())
    return said


def cached(source: Source, architecture: str) -> bytes:
    """Returns machine code from the user's cache, and compiles it first if it is not there."""
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
    """Returns the compiler's version. NVRTC uses Triton's headers, so it includes Triton's."""
    if _nvrtc_is_here() and not of_cutlass:
        from cuda.bindings import nvrtc

        return f"nvrtc {nvrtc.nvrtcVersion()[1:]}, headers of triton {metadata.version('triton')}"
    return subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout


def constants(**named: str | int) -> Constants:
    """Returns constants by name, in a fixed order."""
    return tuple(sorted(named.items()))


def resources(log: str, name: str) -> Mapping[str, int]:
    """Reads registers, bytes of stack and of shared memory of kernel `name` from ptxas's log."""
    found = re.search(
        rf"entry function '{name}'.*?(\d+) bytes stack frame.*?Used (\d+) registers([^\n]*)",
        log,
        re.DOTALL,
    )
    if found is None:
        raise CompilationError(f"ptxas said nothing: {log!r}")
    shared = re.search(r"(\d+) bytes smem", found[3])
    return {
        "registers": int(found[2]),
        "spill_bytes": int(found[1]),
        "shared_bytes": int(shared[1]) if shared else 0,
    }
