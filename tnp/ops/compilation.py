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
# Arguments that are float32 whatever the inputs are.
FLOAT32 = {"lse_ptr", "delta_ptr", "scale", "scale_log2"}


@cache
def compile_all() -> list[dict]:
    """Rows of table `kernels` without provenance, one per configuration, dtype and target.

    Raises RuntimeError with the compiler's message if a configuration does not compile.
    """
    n_children = os.cpu_count() or 1
    with ThreadPoolExecutor(n_children) as pool:
        parts = pool.map(_compile_in_child, range(n_children), [n_children] * n_children)
        return [row for rows in parts for row in rows]


def _compile_in_child(part: int, n_parts: int) -> list[dict]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    environment["TRITON_ALWAYS_COMPILE"] = "1"  # `compile_s` must not time a cache
    command = [sys.executable, "-m", "tnp.ops.compilation", str(part), str(n_parts)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    if child.returncode:
        raise RuntimeError(f"a kernel does not compile: {child.stderr[-400:]}")
    return json.loads(child.stdout)


def _jobs() -> list[tuple]:
    """(name, kernel, configuration, dtype, head_dim, capability) of everything committed."""
    import torch

    from tnp.ops.attention import triton_backward, triton_forward
    from tnp.ops.attention.primitives import CONFIGS, LaunchConfig

    kernels = {
        "forward": ("attention_fwd", triton_forward._attention_fwd_kernel),
        "delta": ("attention_bwd_delta", triton_backward._delta_kernel),
        "dkdv": ("attention_bwd_dkdv", triton_backward._attention_bwd_dkdv_kernel),
        "dq": ("attention_bwd_dq", triton_backward._attention_bwd_dq_kernel),
    }
    rows = triton_backward.DELTA_ROWS
    delta = {("delta", itemsize, 64): LaunchConfig(rows, rows, 4, 1) for itemsize in (2, 4)}
    return [
        (*kernels[key], config, dtype, head_dim, capability)
        for (key, itemsize, head_dim), config in (CONFIGS | delta).items()
        for dtype in DTYPES
        if getattr(torch, dtype).itemsize == itemsize
        for capability in TARGETS
    ]


def _compile(kernel, config, dtype: str, head_dim: int, capability: int):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tiles = config.kernel_arguments()
    options = {name: tiles.pop(name) for name in ("num_warps", "num_stages")}
    constexprs = {
        name: value
        for name, value in ({"HEAD_DIM": head_dim} | tiles).items()
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


def _row(name: str, kernel, config, dtype: str, head_dim: int, capability: int) -> dict:
    target, shared_limit = TARGETS[capability]
    start = time.perf_counter()
    try:
        compiled = _compile(kernel, config, dtype, head_dim, capability)
    except Exception as error:
        raise RuntimeError(f"{name} {dtype} head_dim {head_dim} for {target}: {error}") from error
    compile_s = time.perf_counter() - start
    registers, spill_bytes = _resources(compiled.asm["cubin"])
    return {
        "kernel": name,
        "target": target,
        "dtype": dtype,
        "launch_config": json.dumps({"HEAD_DIM": head_dim} | config.kernel_arguments()),
        "registers": registers,
        "spill_bytes": spill_bytes,
        "shared_bytes": compiled.metadata.shared,
        "shared_limit_bytes": shared_limit,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "compile_s": compile_s,
    }


if __name__ == "__main__":
    if len(sys.argv) == 3:  # a child: its share of the jobs
        jobs = _jobs()[int(sys.argv[1]) :: int(sys.argv[2])]
        print(json.dumps([_row(*job) for job in jobs]))
    else:
        for row in compile_all():
            print(*row.values(), sep="  ")
