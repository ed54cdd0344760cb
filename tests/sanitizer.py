"""`python -m tests.sanitizer` runs small problems under compute-sanitizer on a GPU.

The tools are memcheck, synccheck and, with --racecheck, racecheck. The exit code is 1 if one found
anything. Each problem is a process of its own, with a time limit. Every tensor is an allocation of
its own, so that memcheck sees an access past its end.
"""

import argparse
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import torch

from tnp.bench.ncu import TOOLKIT

TOOLS = "memcheck", "synccheck", "racecheck"
LIMIT_S, FOUND = 120, 99  # seconds of a child, and its exit code where the tool found something
N = 333  # tokens: more than few_keys takes, and no multiple of a tile
# Cases of attention: heads of queries and of keys, batch, and what is asked.
KINDS = {
    "full": ((4, 4), 2, {}),
    "few_keys": ((4, 4), 2, {"n_k": 77}),
    "causal": ((4, 4), 2, {"causal": True}),
    "window": ((4, 4), 2, {"causal": True, "window": 70}),
    "packed": ((4, 4), 1, {"causal": True, "lengths": (100, 0, 1, N - 101)}),
    "grouped": ((8, 2), 48, {"causal": True}),
    "by_head": ((8, 2), 1, {"causal": True}),  # one sequence, whose heads share keys
    "n_keys": ((4, 4), 4, {"n_keys": (N + 1000, -1, 1, 130)}),  # two out of range
    "wrong_pack": ((4, 4), 1, {"causal": True, "lengths": (100, 1, N)}),  # too long
}
STEPS = "wmma_step_1", "wmma_step_2", "wmma_step_3"  # forward only
PROBLEMS = [
    *map("/".join, product(("fused", "separate", "portable"), ("64", "128"), KINDS)),
    *map("/".join, product(("decode",), ("64", "128"), ("contiguous", "pages"))),
    *map("/".join, product(("buffered",), ("32", "64"), ("whole", "n_keys"))),
    *map("/".join, product(("draw",), ("64",), ("one", "four"))),
    # CUDA C++ needs package ./lab[cute].
    *map("/".join, product((*STEPS, "wmma", "cute"), ("64", "128"), ("full", "causal", "grouped"))),
    *map("/".join, product(("cute",), ("32",), ("full", "causal", "grouped"))),
    *map("/".join, product(("gelu_linear",), ("64",), ("full", "ragged"))),
    *map("/".join, product(("rows",), ("333", "4096"), ("few", "many"))),
]


def attend(implementation: str, head_dim: int, kind: str) -> None:
    """Runs attention forward, and backward where the implementation has a backward pass."""
    from tnp.ops.attention import attention

    (heads, kv_heads), batch, asked = KINDS[kind]
    asked = dict(asked)
    n_k, lengths = asked.pop("n_k", N), asked.pop("lengths", None)
    if lengths:
        ends = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
        asked |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    if "n_keys" in asked:
        asked["n_keys"] = torch.tensor(asked["n_keys"], dtype=torch.int32, device="cuda")
    trains = implementation not in STEPS
    like = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": trains}
    shapes = (heads, N), (kv_heads, n_k), (kv_heads, n_k)
    q, k, v = (torch.randn(batch, *shape, head_dim, **like) for shape in shapes)
    total = attention(q, k, v, implementation=implementation, **asked).sum()
    if trains:
        total.backward()


def decode(head_dim: int, kind: str) -> None:
    """Ragged lengths, one of them out of range, and so is one page: neither may be read."""
    from tnp.ops.decode_attention import decode_attention

    like = {"device": "cuda", "dtype": torch.bfloat16}
    lengths = torch.tensor([0, 1, 130, 513, 512], dtype=torch.int32, device="cuda")
    q, shape, table = torch.randn(5, 8, 2, head_dim, **like), (5, 2, 512, head_dim), None
    if kind == "pages":
        table, shape = torch.arange(1, 41, device="cuda").int().view(5, 8), (40, 2, 64, head_dim)
    k, v = torch.randn(2, *shape, **like)
    decode_attention(q, k.clone(), v.clone(), lengths, table, implementation="triton")


def buffered(head_dim: int, kind: str) -> None:
    """All rows around a buffer of two blocks, forward and backward."""
    from tnp.ops.buffered_attention import buffered_attention

    like = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    q, k, v = (torch.randn(2, 3, n, head_dim, **like) for n in (240, 127, 127))
    lengths = None
    if kind == "n_keys":  # the second out of range
        lengths = torch.tensor([5, 5000], dtype=torch.int32, device="cuda")
    buffered_attention(
        q, k, v, 70, n_groups=1, n_keys=lengths, all_rows=True, implementation="triton"
    ).sum().backward()


def draw(head_dim: int, kind: str) -> None:
    """Launches our kernels of a drawn target, for one sample or four."""
    from tnp.dispatch import devices
    from tnp.ops.kv_cache.append_kernel import entry
    from tnp.ops.projection import linear
    from tnp.ops.rms_norm_linear import rms_norm_linear

    batch, width, like = (1 if kind == "one" else 4), 8 * head_dim, {"device": "cuda"}
    like["dtype"] = torch.bfloat16
    x, update, gain = *torch.randn(2, batch, 2, width, **like), torch.ones(width, **like)
    weight = torch.randn(3 * width, width, **like)
    _, rows = rms_norm_linear(x, update, gain, weight, implementation="triton")
    cache = torch.zeros(batch, 16, 333, head_dim, **like)
    lengths = torch.full((batch,), 333, dtype=torch.int32, device="cuda")
    entry(devices.of_device(cache.device), cache, n_rows=2)(cache, rows, lengths)
    linear(rows, torch.randn(500, 3 * width, **like), implementation="fused")


def gelu_and_linear(head_dim: int, kind: str) -> None:
    """Runs GELU and linear in CUDA C++, with gradients and without."""
    from tnp.ops.products import gelu_linear

    like = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    rows, n_in, n_out = (256, 8 * head_dim, 256) if kind == "full" else (N, head_dim + 6, 516)
    x, weight, bias = (torch.randn(*n, **like) for n in ((rows, n_in), (n_out, n_in), (n_out,)))
    gelu_linear(x, weight, bias, implementation="wmma").sum().backward()
    gelu_linear(x.detach(), weight.detach(), bias.detach(), implementation="wmma")


def reduce_rows(width: int, kind: str) -> None:
    """Runs every reduction in CUDA C++. Gradients of layer norm and cross-entropy are Triton's."""
    from tnp.ops.cross_entropy import cross_entropy
    from tnp.ops.layer_norm import layer_norm
    from tnp.ops.softmax import softmax
    from tnp_lab.row_sum import row_sum

    like = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(3 if kind == "few" else N, width, **like)
    for implementation in ("three_passes", "one_pass"):
        softmax(x, implementation=implementation)
    for implementation in ("tree", "shuffles"):
        row_sum(x, implementation=implementation)
    trained, gain = x.clone().requires_grad_(), torch.ones(width, **like, requires_grad=True)
    layer_norm(trained, gain, torch.zeros_like(gain), implementation="one_pass").sum().backward()
    targets = torch.randint(width, (len(x),), device="cuda")
    cross_entropy(trained, targets, implementation="online").backward()


OTHERS = {
    "decode": decode,
    "buffered": buffered,
    "draw": draw,
    "gelu_linear": gelu_and_linear,
    "rows": reduce_rows,
}


def run(problem: str) -> None:
    """Runs a child's problem."""
    name, size, kind = problem.split("/")
    if name in OTHERS:
        OTHERS[name](int(size), kind)
    else:
        attend(name, int(size), kind)
    torch.cuda.synchronize()


def outcome(program: str, tool: str, problem: str) -> str:
    """Returns the end of a child: "nothing", or the problems that were found."""
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND)]
    command += [sys.executable, "-m", "tests.sanitizer", "--problem", problem]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    how = {"cwd": Path(__file__).parents[1], "capture_output": True, "text": True}
    try:
        child = subprocess.run(command, env=environment, timeout=LIMIT_S, **how)
    except subprocess.TimeoutExpired:
        return f"not through after {LIMIT_S} s"
    if child.returncode == 0:
        return "nothing"
    said = (child.stdout + child.stderr).strip()
    return ("found:\n" if child.returncode == FOUND else "it did not run:\n") + said[-2000:]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sanitizer", description=__doc__)
    parser.add_argument("--racecheck", action="store_true", help="run racecheck as well")
    parser.add_argument("--jobs", type=int, default=4, help="children at a time (%(default)s)")
    parser.add_argument("--problem", choices=PROBLEMS, help="run this one, without a tool")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here: compute-sanitizer watches kernels on one")
    if asked.problem:
        return run(asked.problem)
    program = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:{TOOLKIT}")
    if program is None:
        sys.exit("compute-sanitizer is not installed here: it comes with NVIDIA's CUDA toolkit")
    pairs = list(product(TOOLS[: 2 + asked.racecheck], PROBLEMS))
    bad = 0
    with ThreadPoolExecutor(asked.jobs) as pool:
        outcomes = pool.map(lambda pair: outcome(program, *pair), pairs)
        for (tool, problem), found in zip(pairs, outcomes, strict=True):
            print(f"{tool} {problem}: {found}", flush=True)
            bad += found != "nothing"
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
