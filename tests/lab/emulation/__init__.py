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
# Kernels that differ only in macros must not share their static memory.
APART = "-fno-gnu-unique"
# An instruction of one operand in PTX, and what computes it here.
ASSEMBLY = re.compile(r'asm\("(\S+) %0, %1;" : "=f"\((\w+)\) : "f"\((\w+)\)\)')
PTX = {"ex2.approx.ftz.f32": "exp2f"}


def loaded(source: nvrtc.Source, architecture: str) -> Launch:
    """Returns a launch that runs a kernel on tensors in this CPU's memory, block after block."""
    return _compiled(source, source.path.read_text())


@cache
def _compiled(source: nvrtc.Source, text: str) -> Launch:
    folder = Path(tempfile.mkdtemp())
    file, library = folder / "kernel.cpp", folder / "kernel.so"
    text = ASSEMBLY.sub(lambda found: f"{found[2]} = {PTX[found[1]]}({found[3]})", text)
    entry = f"emulation::run({source.name}, grid, threads, given)"
    header = HEADERS / ("cute.h" if source.cutlass else "cuda.h")
    file.write_text(
        f'#include "{header}"\n#line 1 "{source.path}"\n{text}\n'
        f'extern "C" void run(unsigned grid, unsigned threads, void** given) {{ {entry}; }}\n'
    )
    if source.cutlass:  # nvcc knows where CUDA's headers are, which CUTLASS's include
        command = ["nvcc", "-x", "c++", f"-Xcompiler=-w,-fPIC,{APART}", f"-I{source.cutlass}"]
    else:
        for name in EMPTY:
            (folder / name).touch()
        command = [COMPILER, "-w", "-fPIC", APART, f"-I{folder}"]
    command += ["-O1", "-std=c++20", "-shared", f"-I{nvrtc.ROOT}"]
    command += [f"-D{name}={value}" for name, value in source.constants]
    child = subprocess.run([*command, "-o", library, file], capture_output=True, text=True)
    if child.returncode:
        raise nvrtc.CompilationError(child.stderr)
    function = ctypes.CDLL(str(library)).run

    def launch(grid: tuple[int, ...], threads: int, arguments: list) -> None:
        boxed = [ctypes.c_int64(x) if isinstance(x, int) else x for x in arguments]
        pointers = (ctypes.c_void_p * len(boxed))(*(ctypes.addressof(x) for x in boxed))
        function(grid[0], threads, pointers)

    return launch
