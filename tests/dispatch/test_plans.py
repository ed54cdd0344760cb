"""Tests that a plan decides once, launches as Triton would, and serves no other problem."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tnp.dispatch import custom_op, devices, plans, selection, tuned_tables
from tnp.dispatch.call import call, forget
from tnp.ops import attention as attention_package
from tnp.ops import swiglu as swiglu_package

ROOT = Path(__file__).parents[2]
ATTENTION, SWIGLU = attention_package.OPERATOR, swiglu_package.OPERATOR
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def no_plans(monkeypatch):
    """Nothing is known at the start, and nothing is left behind."""
    forget()
    monkeypatch.delenv(selection.AUTO_VARIABLE, raising=False)
    yield
    forget()


def qkv(n_q: int = 5, n_k: int = 3, dtype=torch.float32) -> list[torch.Tensor]:
    return [torch.randn(1, 2, n, 16, device=DEVICE).to(dtype) for n in (n_q, n_k, n_k)]


def gate_and_up(*shape: int, dtype=torch.float32) -> list[torch.Tensor]:
    return [torch.randn(*shape or (4, 8), device=DEVICE).to(dtype) for _ in range(2)]


CALLS = {
    "attention": (ATTENTION, "fused", lambda: (*qkv(), None, None, None), (0.25,)),
    "swiglu": (SWIGLU, "triton", lambda: tuple(gate_and_up()), ()),
}


@pytest.fixture
def decisions(monkeypatch) -> list[str]:
    """Notes which functions are asked to decide anything, in order."""
    found: list[str] = []

    def counting(name, function):
        def counted(*arguments, **options):
            found.append(name)
            return function(*arguments, **options)

        return counted

    kernels_of = selection.kernels_of

    def counted_kernels(*arguments):
        return {
            name: replace(kernel, prepare=counting("prepare", kernel.prepare))
            for name, kernel in kernels_of(*arguments).items()
        }

    monkeypatch.setattr(selection, "kernels_of", counted_kernels)
    monkeypatch.setattr(selection, "choose", counting("choose", selection.choose))
    monkeypatch.setattr(plans, "describe", counting("describe", selection.describe))
    return found


def compiled(function):
    torch._dynamo.reset()
    backend = "inductor" if DEVICE.type == "cuda" else "aot_eager"
    return torch.compile(function, fullgraph=True, backend=backend)


def checkpointed(function):
    """Keeps the results of our operators, and computes all else again."""
    ours = {custom_op.custom_op(operator) for operator, *_ in CALLS.values()}

    def policy(ctx, op, *arguments, **named):
        return CheckpointPolicy.MUST_SAVE if op in ours else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return partial(checkpoint, function, use_reentrant=False, context_fn=contexts)


ROUTES = {"eager": lambda function: function, "compiled": compiled, "checkpoint": checkpointed}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", CALLS)
def test_a_second_call_decides_nothing(name, route, decisions, monkeypatch):
    operator, implementation, draw, scalars = CALLS[name]
    function = ROUTES[route](lambda *x: call(operator, implementation, x, scalars))

    def step() -> list[str]:
        decisions.clear()
        inputs = tuple(x if x is None else x.requires_grad_() for x in draw())
        wanted = [x for x in inputs if x is not None]
        output = function(*inputs)
        torch.autograd.grad(output, wanted, torch.ones_like(output))
        return list(decisions)

    both = ["describe", "choose", "prepare", "choose", "prepare"]
    assert step() == both and step() == []
    for variable, value in ((selection.CHECK_VARIABLE, "1"), (tuned_tables.VARIABLE, str(ROOT))):
        monkeypatch.setenv(variable, value)  # reaches graphs that are compiled already
        assert step() == both and step() == []
    forget()
    assert step() == both and step() == []
    assert len(plans.launch_configs()) == (1 if route == "eager" else 2)


@pytest.mark.parametrize("route", ["eager", "compiled"])
def test_a_refusal_is_decided_once_and_may_be_none(route, decisions):
    inputs = gate_and_up(dtype=torch.float64)

    def refused(or_none, *x):
        return x[0] if call(SWIGLU, "triton", x, (), (), or_none) is None else x[1]

    for expected in (["describe"] if route == "eager" else [], []):
        decisions.clear()
        assert ROUTES[route](partial(refused, True))(*inputs) is not None
        assert decisions == expected
    for _ in range(2):
        with pytest.raises(RuntimeError, match="float64: choose torch or auto"):
            refused(False, *inputs)


def n_plans(operator) -> int:
    return len(plans.plans(operator).by_key)


def swiglu(gate, up, implementation="torch"):
    return call(SWIGLU, implementation, (gate, up))


def test_another_problem_has_another_plan():
    gate, up = gate_and_up()
    shifted = torch.randn(33, device=DEVICE)[1:].view(4, 8)
    others = (
        (gate, up),
        (gate.bfloat16(), up.bfloat16()),
        (gate.to("meta"), up.to("meta")),
        (gate.mT.contiguous().mT, up),
        (gate, shifted),
        (gate[:3], up[:3]),
        (gate.clone().requires_grad_(), up),
    )
    for number, inputs in enumerate(others, 1):
        for _ in range(2):
            y = swiglu(*inputs)
            assert (y.dtype, y.device, y.shape) == (
                inputs[0].dtype, inputs[0].device, inputs[0].shape,
            )  # fmt: skip
        assert n_plans(SWIGLU) == number
    swiglu(*(x.clone() for x in others[0]))  # the same in other memory
    swiglu(*others[0], implementation="auto")
    assert n_plans(SWIGLU) == len(others) + 1


def test_a_switch_has_another_plan(monkeypatch, tmp_path):
    inputs = gate_and_up()
    switches = (
        (lambda: None, 1),
        (lambda: monkeypatch.setenv(selection.AUTO_VARIABLE, "torch"), 2),
        (lambda: monkeypatch.setenv(selection.CHECK_VARIABLE, "1"), 3),
        (lambda: monkeypatch.setenv(tuned_tables.VARIABLE, str(tmp_path)), 4),
        (lambda: torch.use_deterministic_algorithms(True), 5),
        # Into that folder. Plans by the tables as they were before are dropped.
        (lambda: tuned_tables.write(devices.named("H200"), []), 1),
    )
    try:
        for switch, number in switches:
            switch()
            for _ in range(2):
                swiglu(*inputs, implementation="auto")
            assert n_plans(SWIGLU) == number
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_tensor_that_may_be_missing_is_part_of_the_problem_and_a_scalar_is_not():
    q, k, v = qkv()
    n_keys = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    for options in ({}, {"scale": 0.1}, {"scale": 0.5}, {"n_keys": n_keys}, {"n_keys": n_keys}):
        found, exact = (
            attention_package.attention(q, k, v, **options, implementation=name)
            for name in ("fused", "reference")
        )
        torch.testing.assert_close(found, exact)
    assert n_plans(ATTENTION) == 4


def test_gradients_of_other_strides_have_another_launch():
    inputs = [x.requires_grad_() for x in qkv()]
    o = attention_package.attention(*inputs, implementation="fused")
    (plan,) = plans.plans(ATTENTION).by_key.values()
    ones = torch.ones_like(o)
    results = [
        torch.autograd.grad(o, inputs, gradient, retain_graph=True)
        for gradient in (ones, ones.contiguous(), ones[:1, :1, :1, :1].expand_as(ones), ones)
    ]
    assert len(plan.backwards) == 3
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


def test_plans_are_at_most_4096_and_the_newest_stay():
    known = plans.Plans()
    for number in range(10_000):
        known.find((number,), partial(int, number))
        assert len(known.by_key) <= 4096
    assert list(known.by_key.values()) == list(range(10_000 - len(known.by_key), 10_000))
    assert len(known.by_key) > 2000


def test_threads_share_a_plan(decisions):
    """PyTorch's form: Triton's interpreter is not thread-safe."""
    inputs, barrier, found = gate_and_up(), threading.Barrier(8), []

    def call():
        barrier.wait()
        found.append([swiglu(*inputs) for _ in range(20)])

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert decisions.count("describe") == 1 and n_plans(SWIGLU) == 1
    expected = swiglu_package.reference(*inputs)
    assert len(found) == 8
    assert all(torch.equal(y, expected) for results in found for y in results)


# In a process that compiles: every kernel of both operators for an H200 that is not here. In place
# of the driver's launcher stands one that records what it is given.
PROGRAM = """
import json
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime.jit import JITFunction

from tnp.dispatch import devices, launcher, plans
from tnp.dispatch.spec import Call, Case
from tnp.gates.launches import _candidates
from tnp.dispatch.registry import catalog
from tnp.ops._shared.random_values import Random

OLD = launcher.VERSION == (3, 6)
recorded, through_triton, kept = [], [], []

def plain(x):
    if isinstance(x, torch.Tensor):
        return x.data_ptr()
    if isinstance(x, (list, tuple, torch.Size)):
        return [plain(one) for one in x]
    return x if isinstance(x, (int, float, str, bool, type(None))) else repr(x)

def record(*given):
    head, rest = (given[:7], given[13:]) if OLD else (given[:8] + given[12:15], given[-1])
    if OLD:
        head += given[9:10]
    recorded.append((plain(head), plain(rest)))

class Launcher(nvidia.CudaLauncher):
    launch_cooperative_grid = launch_pdl = gsan_enabled = False
    global_scratch_size = profile_scratch_size = 0
    global_scratch_align = profile_scratch_align = num_ctas = 1

    def __init__(self, source, metadata):
        metas = getattr(metadata, "tensordesc_meta", None)
        self.arg_annotations, self.kernel_signature = ("annotations", source.fn.__name__), b""
        self.launch = nvidia.wrap_handle_tensordesc(record, source.signature, metas)

utils = {f"fill_tma_descriptor{form}": lambda *about: about for form in ("", "_tiled")}
utils |= {
    "load_binary": lambda name, *rest: (1, name, 32, 0, 1024), "unload_module": lambda _: None,
    "get_device_properties": lambda _: {"max_shared_mem": 227 << 10},
}
triton.runtime.driver.set_active(SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
    get_current_stream=lambda _: 7, launcher_cls=Launcher, utils=SimpleNamespace(**utils),
))
run = JITFunction.run

def counted(self, *arguments, **options):
    through_triton.append(self.__name__)
    return run(self, *arguments, **options)

JITFunction.run = counted
allocate = torch.Tensor.new_empty_strided

def always_there(self, size, strides, **options):
    if len(kept) == at[0]:
        kept.append(allocate(self, size, strides, **options))
    at[0] += 1
    return kept[at[0] - 1]

torch.Tensor.new_empty_strided = always_there

def dense(self, size, **options):
    like = torch.empty(size, device="meta")
    return always_there(self, tuple(like.shape), like.stride(), **options)

torch.Tensor.new_empty = dense

def step():
    at[0] = 0
    recorded.clear(), through_triton.clear()
    outputs, saved = plan.forward(inputs, numbers)
    gradients = tuple(torch.ones(x.shape, dtype=x.dtype) for x in outputs) if not given else given
    given[:] = gradients
    if wanted:
        plan.backward(tuple(gradients), tuple(plan.kept(inputs, outputs)), saved, numbers)
    return list(recorded), list(through_triton)

H200 = devices.named("H200")
found = {}
for name, problems in PROBLEMS.items():
    operator = catalog().operator(name)
    numbers = operator.numbers
    for own in operator.implementations:
        if own.forward is None:
            continue
        for dtype, sizes in problems:
            problem = operator.problem(dtype, **sizes)
            wanted = operator.differentiated if own.differentiable else ()
            what, case = Call(problem, H200, wanted), Case(problem)
            if own.refuses(what) is not None:
                continue
            drawn = operator.draw(case, Random(case, torch.device("cpu")))
            inputs = tuple(drawn.get(one) for one in operator.tensors)
            forward = _candidates(own.forward, what, None)
            if forward[0][0].name == "cuda":
                continue  # a driver loads CUDA C++
            backward = _candidates(own.backward, what, None) if wanted else []
            for i in range(max(len(forward), len(backward))):
                kernel, config = forward[i % len(forward)]
                forced = {own.forward.name: (kernel.name, config)}
                if wanted:
                    back, back_config = backward[i % len(backward)]
                    forced[own.backward.name] = back.name, back_config
                options = operator.call_options(problem)
                plan = plans.build(operator, own.name, inputs, options, wanted, H200, forced)
                at, given = [0], []
                kept.clear()
                first, compiled = step()
                second, again = step()
                with launcher.watched():
                    third, watched = step()
                assert len(first) == len(compiled) > 1, (len(first), compiled)
                assert again == [] and watched == compiled, (again, watched)
                assert first == third, "allocations moved"
                for name_of, one, two in zip(compiled, first, second, strict=True):
                    assert one[0] == two[0], (name_of, one[0], two[0])
                    constants = len(one[1]) - two[1].count(None)
                    assert all(x is None for x in two[1][constants:]), (name_of, two[1])
                    assert one[1][:constants] == two[1][:constants], (name_of, one[1], two[1])
                    assert len(one[1]) == len(two[1])
                    maps = sum(isinstance(x, list) for x in two[1])
                    found[name_of] = max(maps, found.get(name_of, 0))
print(json.dumps(found))
"""


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the driver is stubbed where there is none")
def test_a_direct_launch_hands_over_what_triton_does():
    sizes = {"batch": 1, "n_heads": 2, "head_dim": 64}
    packed = {"n_sequences": 3, "cu_seqlens_q": True, "cu_seqlens_k": True}
    problems = {
        "swiglu": [("bfloat16", {"rows": 3, "width": 40})],
        "attention": [
            ("bfloat16", sizes | {"n_q": 70, "n_k": 40, "n_keys": True}),
            # Split along the queries, and along the keys.
            ("bfloat16", sizes | {"n_q": 1100, "n_k": 2100}),
            ("bfloat16", sizes | {"n_q": 1100, "n_k": 2100, "base2": True}),
            # Problems of every kind: a mask, grouped heads, packed sequences.
            ("bfloat16", sizes | {"n_q": 70, "n_k": 90, "causal": True, "n_kv_heads": 1}),
            ("bfloat16", sizes | {"n_q": 70, "n_k": 90, "window": 5} | packed),
        ],
    }
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, "-c", f"PROBLEMS = {problems!r}\n{PROGRAM}"],
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    maps = json.loads(child.stdout)
    assert {name: n for name, n in maps.items() if n} == {
        "attention_fwd_hopper_kernel": 4,
        "attention_fwd_hopper_8bit_kernel": 4,
        "_attention_bwd_dkdv_hopper_kernel": 7,
    }
    assert {name for name, n in maps.items() if not n} == {
        "_swiglu_fwd_kernel", "_swiglu_bwd_kernel", "_few_keys_fwd_kernel", "_few_keys_bwd_kernel",
        "_combine_kernel", "_statistics_kernel", "_finish_dq_kernel",
        "_attention_fwd_kernel", "delta_kernel", "attention_bwd_dkdv_kernel",
        "_sum_partials_kernel", "attention_bwd_dq_kernel", "attention_bwd_fused_kernel",
        "_add_shares_kernel",
        "_quantize_kernel", "_attention_fwd_8bit_kernel", "_tiles_kernel",
    }  # fmt: skip
