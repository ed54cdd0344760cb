"""From a call to a launch, with SwiGLU: every route that PyTorch can take to an operator."""

import subprocess
import sys
import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.ops.problems import DEVICE
from tnp.dispatch import call, custom_op, plans, selection
from tnp.ops._shared.ranges import asserts
from tnp.ops.swiglu import OPERATOR, swiglu
from tnp.util.bounded import Bounded

NAMES = ("triton", "torch", "auto")
ours = partial(swiglu, implementation="triton")


def formula(gate, up):
    return F.silu(gate) * up


def draw(*shape):
    return [torch.randn(shape or (3, 20), device=DEVICE, requires_grad=True) for _ in range(2)]


def results(function, *tensors):
    """The output and the gradients of the sum of its squares."""
    y = function(*tensors)
    return y.detach(), *torch.autograd.grad(y.square().sum(), tensors)


def assert_equal_to_formula(function, *tensors, formula=formula):
    torch.testing.assert_close(results(function, *tensors), results(formula, *tensors))


@pytest.fixture
def launches(monkeypatch):
    """Counts of forward and backward launches, of plans made from here on."""
    counts = {"forward": 0, "backward": 0}
    forward, backward = plans.KernelPlan.forward, plans.KernelPlan.backward

    def counted_forward(self, *arguments):
        counts["forward"] += 1
        return forward(self, *arguments)

    def counted_backward(self, *arguments):
        counts["backward"] += 1
        return backward(self, *arguments)

    monkeypatch.setattr(plans.KernelPlan, "forward", counted_forward)
    monkeypatch.setattr(plans.KernelPlan, "backward", counted_backward)
    return counts


@pytest.mark.parametrize("name", NAMES)
def test_eager(name):
    assert_equal_to_formula(partial(swiglu, implementation=name), *draw())


@pytest.mark.parametrize("wanted", ["gate", "up"])
@pytest.mark.parametrize("route", ["eager", "compiled"])
def test_one_gradient_alone(wanted, route):
    gate, up = draw()
    one = {"gate": gate, "up": up}
    other = one.pop("up" if wanted == "gate" else "gate")
    other.requires_grad_(False)
    function = ours
    if route == "compiled":
        function = torch.compile(ours, fullgraph=True, backend="aot_eager")
    (got,) = torch.autograd.grad(function(gate, up).sum(), list(one.values()))
    (want,) = torch.autograd.grad(formula(gate, up).sum(), list(one.values()))
    torch.testing.assert_close(got, want)


def test_a_second_call_builds_no_plan(monkeypatch):
    gate, up = draw(2, 9)
    results(ours, gate, up)
    built = []
    monkeypatch.setattr(call, "build", lambda *a, **k: built.append(a) or plans.build(*a, **k))
    results(ours, gate, up)
    assert not built
    monkeypatch.setenv(selection.AUTO_VARIABLE, "torch")  # part of the key
    results(ours, gate, up)
    assert len(built) == 1


@pytest.mark.parametrize(("variable", "on", "value"), [("TNP_AUTO", "torch", "pytorch"),
                                                        ("TNP_CHECK", "1", "true")])  # fmt: skip
def test_a_switch_that_says_nothing_we_know_is_one_sentence(variable, on, value, monkeypatch):
    read = {"TNP_AUTO": lambda: swiglu(*draw(1, 7), implementation="auto"), "TNP_CHECK": asserts}
    for off in ("", on):
        monkeypatch.setenv(variable, off)
        read[variable]()
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"{variable} is '{value}' .*: set it to '{on}', or unset"):
        read[variable]()


def test_plans_are_bounded(monkeypatch):
    known = plans.plans(OPERATOR)
    monkeypatch.setattr(known, "by_key", Bounded(10))
    for width in range(1, 40):
        swiglu(torch.zeros(1, width), torch.zeros(1, width))
    assert 0 < len(known.by_key) <= 10


def test_threads_share_a_plan(monkeypatch):
    gate, up = draw(3, 33)
    built, wrong = [], []
    monkeypatch.setattr(call, "build", lambda *a, **k: built.append(a) or plans.build(*a, **k))
    monkeypatch.setattr(plans.plans(OPERATOR), "by_key", Bounded())
    want = formula(gate, up)

    def work():  # in PyTorch's form: Triton's interpreter is not thread-safe
        for _ in range(20):
            if not torch.equal(swiglu(gate, up), want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1 and not wrong


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_compiled(name, dynamic):
    torch._dynamo.reset()
    function = torch.compile(
        partial(swiglu, implementation=name), fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    for n_rows in (3, 5) if dynamic else (3,):
        assert_equal_to_formula(function, *draw(n_rows, 20))


def test_opcheck():
    gate, up = draw()
    op = custom_op.custom_operator(OPERATOR).differentiable
    decided = ("swiglu", "triton", "float32", gate.device, ("gate", "up"), (), (), (), None)
    found = torch.library.opcheck(op, (gate, up, custom_op._decided(*decided)))
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("saved", [True, False])
def test_selective_checkpoint_launches_what_is_saved_once(launches, saved):
    op = custom_op.custom_op(OPERATOR)

    def policy(ctx, called, *arguments, **named):
        keep = called is op and saved
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def block(gate, up):
        return ours(gate * 1.0, up).sin()

    contexts = partial(create_selective_checkpoint_contexts, policy)
    function = partial(checkpoint, block, use_reentrant=False, context_fn=contexts)
    assert_equal_to_formula(function, *draw(), formula=lambda g, u: formula(g, u).sin())
    assert launches["forward"] == (1 if saved else 2)


def test_plain_checkpoint_launches_twice(launches):
    function = partial(checkpoint, lambda gate, up: ours(gate * 1.0, up), use_reentrant=False)
    assert_equal_to_formula(function, *draw())
    assert launches == {"forward": 2, "backward": 1}


def test_fake_tensors_launch_nothing(launches):
    with FakeTensorMode():
        fake = torch.empty(3, 5, device=DEVICE)
        assert ours(fake, fake).shape == (3, 5)
    assert ours(fake, fake).shape == (3, 5)  # outside their mode, they say what they are
    assert launches["forward"] == 0


def test_a_subclass_of_tensors():
    class Labelled(torch.Tensor):
        pass

    gate, up = (x.detach() for x in draw())
    got = ours(gate.as_subclass(Labelled), up.as_subclass(Labelled))
    torch.testing.assert_close(got.as_subclass(torch.Tensor), formula(gate, up))


def test_refusals_are_one_sentence():
    gate, up = draw()
    with pytest.raises(ValueError, match=r"gate is torch.float32 \(3, 20\) .* they must be equal"):
        ours(gate, up[:2])
    with pytest.raises(ValueError, match="up is of type float: it must be a tensor"):
        ours(gate, 1.0)
    with pytest.raises(ValueError, match="up is of type ndarray: it must be a tensor"):
        ours(gate, up.detach().cpu().numpy())
    with pytest.raises(ValueError, match="gate is None: it must be a tensor"):
        ours(None, up)
    with pytest.raises(ValueError, match="unknown implementation 'x' of swiglu: choose from torch"):
        swiglu(gate, up, implementation="x")
    with pytest.raises(ValueError, match="implementation is None: it must be a name, as 'torch'"):
        swiglu(gate, up, implementation=None)
    with pytest.raises(RuntimeError, match="it takes bfloat16, float16, float32, not float64"):
        ours(gate.double(), up.double())


@pytest.mark.parametrize("route", ["eager", "compiled"])
@pytest.mark.parametrize("name", NAMES)
def test_empty_tensors(name, route):
    gate, up = draw(0, 5)
    function = partial(swiglu, implementation=name)
    if route == "compiled":
        function = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=False)
    y = function(gate, up)
    y.sum().backward()
    assert y.shape == gate.grad.shape == up.grad.shape == (0, 5)


def test_planning_imports_neither_torch_nor_triton():
    code = """
import sys
import tnp.dispatch.spec, tnp.dispatch.tuned_tables, tnp.dispatch.devices
import tnp.ops.rms_norm_swiglu, tnp.ops.rope
from tnp.ops.swiglu import OPERATOR
problem = OPERATOR.problem("bfloat16", rows=4, width=8)
assert OPERATOR.from_json(problem.json) == problem
model, run = {"gated": True, "d_ff": 14336}, {"batch": 8, "n_tokens": 2048, "dtype": "bfloat16"}
assert OPERATOR.within(model, run)["rows"] == 16384
assert OPERATOR.within(model | {"gated": False}, run) is None
assert not {"torch", "triton"} & sys.modules.keys(), "imported"
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_two_plain_forms_in_one_graph(monkeypatch):
    """The second is found although nobody had asked for it when the first was."""
    from types import ModuleType

    from tnp.dispatch import custom_op
    from tnp.ops.mlp import mlp
    from tnp.ops.projection import linear

    monkeypatch.setattr(custom_op, "_plain", ModuleType("plain"))
    x, weight = torch.randn(3, 8), torch.randn(8, 8)

    def both(x, weight):
        return mlp(linear(x, weight), weight, weight)

    compiled = torch.compile(both, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, weight), both(x, weight))
