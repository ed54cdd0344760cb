"""Compiles CUDA C++ for this CPU, and launches it in place of `tnp_lab.launch.loaded`."""

import ctypes
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from tnp_lab import nvrtc
from tnp_lab.launch import Launch

HEADERS = Path(__file__).parent
EMPTY = ("cuda_bf16.h", "cuda_fp16.h", "cuda_pipeline_primitives.h", "mma.h")  # cuda.h says it all
COMPILER = shutil.which("g++")
# Kernels that differ only in macros must not share their static memory, which the last flag is for.
FLAGS = ("-w", "-fPIC", "-fno-gnu-unique")
OPTIONS = ("-O1", "-std=c++20")
KERNEL = re.compile(r"__global__ void .* (\w+)\($", re.MULTILINE)
# An instruction of one operand in PTX, and what computes it here.
ASSEMBLY = re.compile(r'asm\("(\S+) %0, %1;" : "=f"\((\w+)\) : "f"\((\w+)\)\)')
PTX = {"ex2.approx.ftz.f32": "exp2f"}


def loaded(source: nvrtc.Source, architecture: str) -> Launch:
    """Returns a launch that runs a kernel on tensors in this CPU's memory, block after block."""
    return compiled(source, source.path.read_text())


def compiled(source: nvrtc.Source, text: str) -> Launch:
    """Returns the same with `text` in place of the source's own."""
    library = _library(source.path, source.constants, source.cutlass, text)
    function = getattr(library, f"run_{source.name}")

    def launch(grid: tuple[int, ...], threads: int, arguments: list) -> None:
        boxed = [ctypes.c_int64(x) if isinstance(x, int) else x for x in arguments]
        pointers = (ctypes.c_void_p * len(boxed))(*(ctypes.addressof(x) for x in boxed))
        function(grid[0], threads, pointers)

    return launch


@cache
def _library(path: Path, constants: tuple, cutlass: str, text: str) -> ctypes.CDLL:
    """Compiles all kernels of a file, each with an entry of its own."""
    folder = Path(tempfile.mkdtemp())
    file, library = folder / "kernel.cpp", folder / "kernel.so"
    text = ASSEMBLY.sub(lambda found: f"{found[2]} = {PTX[found[1]]}({found[3]})", text)
    entries = "".join(
        f'extern "C" void run_{name}(unsigned grid, unsigned threads, void** given) '
        f"{{ emulation::run({name}, grid, threads, given); }}\n"
        for name in KERNEL.findall(text)
    )
    header = "cute.h" if cutlass else "cuda.h"
    file.write_text(f'#include "{header}"\n#line 1 "{path}"\n{text}\n{entries}')
    if cutlass:  # nvcc knows where CUDA's headers are, which CUTLASS's include
        flags = f"-Xcompiler={','.join(FLAGS)}"
        command = ["nvcc", "-x", "c++", flags, f"-I{cutlass}", f"-I{HEADERS}"]
    else:
        command = [COMPILER, *FLAGS, f"-I{_headers()}", f"-I{HEADERS}"]
    command += [*OPTIONS, "-shared", f"-I{nvrtc.ROOT}"]
    command += [f"-D{name}={value}" for name, value in constants]
    _run([*command, "-o", library, file])
    return ctypes.CDLL(str(library))


@cache
def _headers() -> Path:
    """Returns a folder with `cuda.h` compiled, and with the headers that it stands for, empty."""
    folder = Path(tempfile.mkdtemp())
    for name in EMPTY:
        (folder / name).touch()
    command = [COMPILER, *FLAGS, *OPTIONS, "-x", "c++-header", HEADERS / "cuda.h"]
    _run([*command, "-o", folder / "cuda.h.gch"])
    return folder


def _run(command: list) -> None:
    child = subprocess.run(command, capture_output=True, text=True)
    if child.returncode:
        raise nvrtc.CompilationError(child.stderr)
