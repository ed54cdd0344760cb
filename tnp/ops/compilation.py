"""Compile every committed kernel configuration for every GPU it is meant for, without a GPU.

`compile_all` gives rows of table `kernels`: registers, spills and shared memory, read from the
machine code by the `cuobjdump` that ships with triton. A process with TRITON_INTERPRET=1 holds
interpreted functions that cannot be compiled, so the compiling happens in child processes.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

# Compute capability → name, and the shared memory a block may use there (CUDA programming guide).
TARGETS = {
    80: ("sm_80", 163 * 1024),
    90: ("sm_90a", 227 * 1024),
    100: ("sm_100a", 227 * 1024),
}
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
HEAD_DIM = 64
# Arguments that are float32 whatever the inputs are.
FLOAT32 = {"lse_ptr", "delta_ptr", "scale", "scale_log2"}


@cache
def compile_all() -> list[dict]:
    """Rows of table `kernels` without provenance, one per kernel, dtype and target.

    Raises RuntimeError with the compiler's message if a configuration does not compile.
    """
    jobs = [(capability, dtype) for capability in TARGETS for dtype in DTYPES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [row for rows in pool.map(lambda job: _compile_in_child(*job), jobs) for row in rows]


def _compile_in_child(capability: int, dtype: str) -> list[dict]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "tnp.ops.compilation", str(capability), dtype]
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    if child.returncode:
        raise RuntimeError(
            f"compiling for {TARGETS[capability][0]} in {dtype} failed: {child.stderr[-400:]}"
        )
    return json.loads(child.stdout)


def _kernels() -> dict[str, tuple]:
    """Name → (kernel, configuration key); tile arguments come from the committed table."""
    from tnp.ops.attention import triton_backward, triton_forward

    return {
        "attention_fwd": (triton_forward._attention_fwd_kernel, "forward"),
        "attention_bwd_delta": (triton_backward._delta_kernel, "delta"),
        "attention_bwd_dkdv": (triton_backward._attention_bwd_dkdv_kernel, "dkdv"),
        "attention_bwd_dq": (triton_backward._attention_bwd_dq_kernel, "dq"),
    }


def _compile(kernel, config, dtype: str, capability: int):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tiles = config.kernel_arguments()
    options = {name: tiles.pop(name) for name in ("num_warps", "num_stages")}
    constexprs = {
        name: value
        for name, value in ({"HEAD_DIM": HEAD_DIM} | tiles).items()
        if name in kernel.arg_names
    }
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constexprs:
            signature[name] = "constexpr"
        elif name in FLOAT32 or name.endswith("_ptr"):
            scalar = "fp32" if name in FLOAT32 else DTYPES[dtype]
            signature[name] = f"*{scalar}" if name.endswith("_ptr") else scalar
        else:
            signature[name] = "i32"
        # As at run time: allocations and strides are multiples of 16, sizes need not be.
        if name.endswith("_ptr") or name.startswith("stride_"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and bytes of stack, which is where ptxas spills, of one kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if match is None:
        raise RuntimeError(f"cuobjdump gave no resource usage: {usage[:200]!r}")
    return int(match[1]), int(match[2])


def _rows(capability: int, dtype: str) -> list[dict]:
    import torch

    from tnp.ops.attention.primitives import LaunchConfig, launch_config
    from tnp.ops.attention.triton_backward import DELTA_ROWS

    target, shared_limit = TARGETS[capability]
    rows = []
    for name, (kernel, key) in _kernels().items():
        config = (
            LaunchConfig(DELTA_ROWS, DELTA_ROWS, 4, 1)
            if key == "delta"
            else launch_config(key, getattr(torch, dtype))
        )
        start = time.perf_counter()
        compiled = _compile(kernel, config, dtype, capability)
        registers, spill_bytes = _resources(compiled.asm["cubin"])
        rows.append(
            {
                "kernel": name,
                "target": target,
                "dtype": dtype,
                "launch_config": json.dumps(config.kernel_arguments()),
                "registers": registers,
                "spill_bytes": spill_bytes,
                "shared_bytes": compiled.metadata.shared,
                "shared_limit_bytes": shared_limit,
                "num_warps": config.num_warps,
                "num_stages": config.num_stages,
                "compile_s": time.perf_counter() - start,
            }
        )
    return rows


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(_rows(int(sys.argv[1]), sys.argv[2])))
    else:
        for row in compile_all():
            print(*row.values(), sep="  ")
