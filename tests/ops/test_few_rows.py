"""Tests when kernels of a few rows wait for those before them, and what they may do
ahead of that; and products in parts.
"""

import pytest
import torch
import triton
import triton.language as tl

from tests.gates.test_compile import in_child
from tests.ops.launched import reads, recorded
from tests.ops.problems import DEVICE
from tnp.dispatch.devices import INTERPRETER, Target
from tnp.dispatch.launcher import Bound
from tnp.gates.checks import relative_error
from tnp.ops._shared.few_rows import add_dot_in_parts, chained
from tnp.ops._shared.ready_weights import weights_ready
from tnp.ops.projection import linear

KERNELS = {
    "streamed", "rms_norm_linear", "decode", "add_parts", "enter", "hopper_tiles", "add_tile_parts",
    "weight",
}  # fmt: skip
OF_STEP = {"embed", "streamed", "heads", "attend", "choice", "largest"}
# Prints, for each kernel, its name and capability, whether it is launched ahead of the end of the
# one before, and in their order what touches memory or has to do with other launches.
WAITS = """
import io, json, re, torch, triton
from contextlib import redirect_stdout
from dataclasses import replace
from tests.llm.test_decoder import TINY
from tnp.dispatch import devices as targets
from tnp.ops.kv_cache.append_kernel import entry
from tnp.dispatch.registry import catalog
from tnp.gates.compile import collect
from tnp.gates.launches import Launch, launches
from tnp.llm import models
from tnp.llm.cache import Cache
from tnp.llm.fused_step import FusedStep
from tnp.llm.tokens import Tokens
from tnp.ops._shared.ready_weights import weights_ready
from tnp.ops.projection import linear

PROBLEMS = {
    "linear": dict(rows=2, n_in=512, n_out=512),
    "quantized_linear": dict(rows=2, n_in=1024, n_out=512, group=64, bits=4, zeros=True),
    "rms_norm_linear": dict(rows=2, width=512, n_out=1536),
    "decode_attention": dict(
        batch=1, heads=8, kv_heads=8, n_queries=2, n_keys=1000, head_dim=64, page=1000
    ),
}
TOUCHES = r"griddepcontrol\\.(\\w+)|(prefetch)\\.|(ld|st)\\.global|(cp)\\.async\\.c"

def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")

def found():
    for capability, ops in ((80, ["linear"]), (90, PROBLEMS)):
        target = targets.of_capability(capability)
        for op in ops:
            operator, more = catalog().operator(op), "rows" in PROBLEMS[op] and op != "linear"
            for other in ({}, {"rows": 1024}) if more else ({},):
                problem = operator.problem("bfloat16", **PROBLEMS[op] | other)
                yield from launches(operator, problem, target)
    target = targets.of_capability(90)
    def ready():
        weight = meta(512, 512)
        with targets.on_meta(target), weights_ready([weight]):
            linear(meta(2, 512), weight, implementation="fused")
    yield Launch(90, "bfloat16", (("ready", "linear"),), ready)
    def enter():
        write = entry(target, meta(1, 16, 1000, 64), 2)
        write(meta(1, 16, 1000, 64), meta(1, 24, 2, 64), meta(1, dtype=torch.int32))
    yield Launch(90, "bfloat16", (("buffer", "enter"),), enter)
    on_meta = {"dtype": torch.bfloat16, "device": "meta"}
    def step():
        for kind in ("gpt2", "qwen3"):
            sizes = replace(TINY[kind].sizes, n_layers=1)
            decoder = models.draw(replace(TINY[kind], sizes=sizes), **on_meta)
            with targets.on_meta(target):
                for batch in (2, 17):
                    FusedStep(decoder).follow(
                        Tokens(batch, 1, (1,), 0, torch.device("meta")), Cache(decoder, batch, 64)
                    )
    yield Launch(90, "bfloat16", (("step", "fused"),), step)

rows = []
for job in collect(found()):
    if job.name not in KERNELS:
        continue
    with redirect_stdout(io.StringIO()):  # the log of ptxas
        ptx = triton.compile(job.source, target=job.target, options=job.options).asm["ptx"]
    touches = ["".join(one) for one in re.findall(TOUCHES, ptx)]
    of = "".join(f"{one}: " for one in ("ready", "step") if one in dict(job.users)) + job.name
    rows.append([of, job.target.arch, bool(job.options["launch_pdl"]), touches])
print(json.dumps(rows))
"""
# Kernels that read ahead what the launch before does not write: lengths, which it only reads too;
# weights that are ready; and the keys of a cache but the newest. Others may prefetch.
AHEAD = {
    "add_parts": {"ld"}, "ready: streamed": {"ld"}, "step: streamed": {"ld", "prefetch"},
    "step: attend": {"ld"},
}  # fmt: skip


def test_kernels_read_ahead_of_the_wait_only_as_listed():
    rows = in_child(f"KERNELS = {KERNELS | OF_STEP}{WAITS}")
    seen = {(name, capability) for name, capability, *_ in rows}
    assert seen >= {("streamed", 80), ("ready: streamed", 90), *((name, 90) for name in KERNELS)}
    assert seen >= {(f"step: {name}", 90) for name in OF_STEP}
    for name, capability, launched_ahead, touches in rows:
        assert launched_ahead == (capability >= 90)
        if not launched_ahead:
            assert not {"wait", "launch_dependents", "prefetch"} & set(touches), name
            continue
        wait = touches.index("wait")
        ahead = set(touches[:wait])
        assert ahead <= AHEAD.get(name, {"prefetch"}), (name, ahead)
        assert "ld" in ahead or "ld" not in AHEAD.get(name, ()), name
        assert touches[wait + 1] == "launch_dependents" and touches.count("wait") == 1
        assert {"ld", "st"} <= set(touches[wait:])


def test_only_hopper_and_newer_launch_ahead():
    ahead = {"CHAINED": True, "launch_pdl": True}
    assert (
        chained(Target("cuda", capability=90)) == chained(Target("cuda", capability=100)) == ahead
    )
    assert chained(Target("cuda", capability=89)) == chained(INTERPRETER) == {"CHAINED": False}


@triton.jit
def _product_kernel(
    a_ptr, w_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr
):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    w = tl.load(w_ptr + n[:, None] * K + k[None, :])
    out = out_ptr + m[:, None] * N + n[None, :]
    tl.store(out, add_dot_in_parts(a, w, tl.load(out), PARTS))


@pytest.mark.parametrize("parts", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_in_parts_are_added_up(parts, dtype):
    generator = torch.Generator().manual_seed(0)
    a, w, out = (
        torch.randn(shape, generator=generator) for shape in ((16, 128), (8, 128), (16, 8))
    )
    a, w, out = a.to(DEVICE, dtype), w.to(DEVICE, dtype), out.to(DEVICE)
    exact = out.double() + a.double() @ w.double().mT
    Bound(_product_kernel, (1,), M=16, N=8, K=128, PARTS=parts, num_warps=parts)(a, w, out)
    assert relative_error(out, exact) < 1e-6


def test_few_rows_are_read_where_they_lie():
    x, weight = torch.randn(3, 5, 64, device=DEVICE).bfloat16(), torch.randn(8, 64, device=DEVICE)
    for view in (x[:, 1:], x.transpose(0, 1), x[..., 16:48], x[0, 0]):
        w = weight[:, : view.shape[-1]]
        with recorded() as launches:
            y = linear(view, w, implementation="fused")
        assert len(launches) == 1 and reads(launches[0], view)
        torch.testing.assert_close(y, linear(view, w))
    columns = x.transpose(1, 2)  # rows of which are not contiguous
    torch.testing.assert_close(
        linear(columns, weight[:, :5], implementation="fused"), linear(columns, weight[:, :5])
    )


def test_only_weights_that_are_ready_are_read_ahead(monkeypatch):
    """A copy that the call itself makes is not ready: the launch right before writes it."""
    x, weight = torch.randn(3, 64, device=DEVICE).bfloat16(), torch.randn(16, 64, device=DEVICE)
    ready, ahead = weight.bfloat16(), []
    real = Bound.__call__
    monkeypatch.setattr(
        Bound,
        "__call__",
        lambda self, *x: ahead.append(self.constexprs["CONSTANT"]) or real(self, *x),
    )
    with weights_ready([weight, ready]):
        results = [
            linear(x, each, implementation="fused")
            for each in (ready, weight, ready.clone(), ready.t().contiguous().t())
        ]
    results.append(linear(x, ready, implementation="fused"))
    assert ahead == [True, False, False, False, False]
    assert all(torch.equal(each, results[0]) for each in results)
