"""Runs a demo of CuTe: `python -m tnp_lab.demos NAME`. Without a name, lists the demos.

A demo is a program in C++ beside this file. The host's compiler builds it in a few seconds, with
the headers of CUTLASS and CUDA. It includes attention/cute.cu for its layouts, and needs no GPU.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tnp.dispatch.spec import Reason
from tnp.util.cli import Parser, end_with, table
from tnp.util.extras import install
from tnp_lab import nvrtc

COMPILER = "g++"
DEMOS = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.cpp"))}


def headers() -> list[str]:
    """Returns the folders of CUTLASS's and CUDA's headers, or an empty list if one is missing."""
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:
        return []
    found = [nvrtc.cutlass(), *map(find_nvidia_header_directory, ("cudart", "cccl"))]
    return found if all(found) else []


def missing() -> Reason:
    """Returns what is missing to build a demo, and how to install it, or None."""
    if not shutil.which(COMPILER):
        return f"{COMPILER}, which compiles the demos, is not here: install version 11 or newer"
    if not headers():
        return f"headers of CUTLASS or CUDA are not installed: run {install('demos', 'lab')}"
    return None


def title(name: str) -> str:
    """Returns what a demo shows: the first line of its file."""
    return DEMOS[name].read_text().partition("\n")[0].removeprefix("// ")


def run(name: str) -> str:
    """Builds a demo, and returns what it prints.

    Raises:
        CompilationError: with the compiler's message.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, name)
        command = [COMPILER, "-std=c++20", "-O1", "-w", "-pthread", "-o", str(program)]
        command += [f"-I{path}" for path in (nvrtc.ROOT, *headers())]
        child = subprocess.run([*command, DEMOS[name]], capture_output=True, text=True)
        if child.returncode:
            raise nvrtc.CompilationError(f"{name}.cpp does not compile: {child.stderr.strip()}")
        return subprocess.run([program], stdout=subprocess.PIPE, text=True, check=True).stdout


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("python -m tnp_lab.demos", description=__doc__.partition("\n")[0])
    parser.add_argument("name", nargs="?", choices=DEMOS, help="without it, the demos are listed")
    name = parser.parse_args(arguments).name
    if name is None:
        print(table(("demo", "shows"), [(demo, title(demo)) for demo in DEMOS]))
        return 0
    if reason := missing():
        print(reason, file=sys.stderr)
        return 1
    try:
        print(run(name), end="")
    except (nvrtc.CompilationError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    end_with(main)
