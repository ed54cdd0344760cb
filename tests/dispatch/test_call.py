"""Tests every route that PyTorch can take from a call to a launch, with SwiGLU."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.compiler.config as compiler_config
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.ops.problems import DEVICE
from tests.refusals import assert_refused
from tnp.dispatch import custom_op, plans
from tnp.ops._shared.ranges import asserts
from tnp.ops.swiglu import OPERATOR, swiglu

NAMES = ("triton", "torch", "auto")
ours = partial(swiglu, implementation="triton")


def formula(gate, up):
    return F.silu(gate) * up


def draw(*shape):
    return [torch.randn(shape or (3, 20), device=DEVICE, requires_grad=True) for _ in range(2)]


def results(function, *tensors):
    """Returns the output and the gradients of the sum of its squares."""
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


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_compiled(name, dynamic):
    torch._dynamo.reset()
    eager = partial(swiglu, implementation=name)
    function = torch.compile(eager, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for n_rows in (3, 5) if dynamic else (3, 0):
        assert_equal_to_formula(eager, *draw(n_rows, 20))
        assert_equal_to_formula(function, *draw(n_rows, 20))


@pytest.mark.parametrize("saved", [True, False, None])
def test_a_checkpoint_launches_again_what_it_does_not_save(launches, saved):
    """None stands for a plain checkpoint, which saves nothing."""
    op = custom_op.custom_op(OPERATOR)

    def policy(ctx, called, *arguments, **named):
        keep = called is op and saved
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def block(gate, up):
        return ours(gate * 1.0, up).sin()

    contexts = partial(create_selective_checkpoint_contexts, policy)
    options = {} if saved is None else {"context_fn": contexts}
    function = partial(checkpoint, block, use_reentrant=False, **options)
    assert_equal_to_formula(function, *draw(), formula=lambda g, u: formula(g, u).sin())
    assert launches == {"forward": 1 if saved else 2, "backward": 1}


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
    assert_refused(
        (lambda: ours(gate, up[:2]), r"gate is torch.float32 \(3, 20\) .* they must be equal"),
        (lambda: ours(gate, 1.0), "up is of type float: it must be a tensor"),
        (lambda: ours(gate, up.detach().cpu().numpy()), "up is of type ndarray: it must be a tens"),
        (lambda: ours(None, up), "gate is None: it must be a tensor"),
        (lambda: swiglu(gate, up, implementation="x"), "unknown implementation 'x' of swiglu: ch"),
        (lambda: swiglu(gate, up, implementation=None), "implementation is None: it must be a na"),
    )
    with pytest.raises(RuntimeError, match="it takes bfloat16, float16, float32, not float64"):
        ours(gate.double(), up.double())


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


def test_changed_code_reads_no_compiled_graph_of_before(tmp_path):
    """PyTorch's cache of graphs would otherwise give an operator what an earlier one saved."""
    (tmp_path / "inner").mkdir()
    file = tmp_path / "inner" / "a.py"
    digests = set()
    for text in ("", "x = 1", "x = 2"):
        file.write_text(text)
        digests.add(custom_op.digest_of(tmp_path))
    assert len(digests) == 3
    here = Path(custom_op.__file__).parents[1]
    assert custom_op.digest_of(here / "dispatch", here / "ops") in compiler_config.cache_key_tag
