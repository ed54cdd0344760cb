"""Compiles CUDA C++ for this CPU, and launches it in place of `tnp_lab.launch.loaded`."""

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from tnp_lab import nvrtc
from tnp_lab.launch import Launch

HEADER = Path(__file__).with_name("cuda.h")
EMPTY = ("cuda_bf16.h", "cuda_fp16.h", "cuda_pipeline_primitives.h", "mma.h")  # HEADER says it all
COMPILER = shutil.which("g++")


def loaded(source: nvrtc.Source, architecture: str) -> Launch:
    """Returns a launch that runs a kernel on tensors in this CPU's memory, block after block."""
    return _compiled(source, source.path.read_text())


@cache
def _compiled(source: nvrtc.Source, text: str) -> Launch:
    folder = Path(tempfile.mkdtemp())
    for name in EMPTY:
        (folder / name).touch()
    file, library = folder / "kernel.cpp", folder / "kernel.so"
    entry = f"emulation::run({source.name}, grid, threads, given)"
    file.write_text(
        f'#include "{HEADER}"\n#line 1 "{source.path}"\n{text}\n'
        f'extern "C" void run(unsigned grid, unsigned threads, void** given) {{ {entry}; }}\n'
    )
    command = [COMPILER, "-O1", "-std=c++20", "-w", "-shared", "-fPIC", f"-I{folder}"]
    command += [f"-I{nvrtc.ROOT}", *(f"-D{name}={value}" for name, value in source.constants)]
    child = subprocess.run([*command, "-o", library, file], capture_output=True, text=True)
    if child.returncode:
        raise nvrtc.CompilationError(child.stderr)
    function = ctypes.CDLL(str(library)).run

    def launch(grid: tuple[int, ...], threads: int, arguments: list) -> None:
        boxed = [ctypes.c_int64(x) if isinstance(x, int) else x for x in arguments]
        pointers = (ctypes.c_void_p * len(boxed))(*(ctypes.addressof(x) for x in boxed))
        function(grid[0], threads, pointers)

    return launch
