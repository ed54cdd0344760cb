"""Tests that each derivative that our operators lack is one sentence, on every route."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd import functional as of_function
from torch.utils.flop_counter import FlopCounterMode

from tests.ops.every_operator import EVERY, Outputs, drawn
from tests.ops.problems import DEVICE
from tnp.dispatch.spec import Case, Implementation
from tnp.ops.rms_norm import rms_norm

ON = {"device": DEVICE}


def squares(outputs: Outputs, *some: torch.Tensor) -> torch.Tensor:
    return sum(x.square().sum() for x in outputs(*some))


def refused(found: Implementation, what: str):
    return pytest.raises(RuntimeError, match=f"'{found.name}' gives no {what}.*'torch'")


@EVERY
def test_second_derivatives_and_batched_gradients_are_refused(operator, found, case):
    if not found.differentiable:
        return
    some, outputs = drawn(operator, found, case)
    leaves = [x.requires_grad_() for x in some]
    with refused(found, "second derivative"):
        first = torch.autograd.grad(squares(outputs, *leaves), leaves, create_graph=True)
        torch.autograd.grad(sum(x.float().square().sum() for x in first), leaves)
    # `torch.autograd.functional` takes another way, and allows for unused inputs.
    with refused(found, "second derivative"):
        vectors = tuple(map(torch.ones_like, some))
        of_function.hvp(partial(squares, outputs), tuple(x.detach() for x in some), vectors)
    made = [x for x in outputs(*leaves) if x.requires_grad]
    several = [torch.ones(2, *x.shape, device=x.device) for x in made]
    with refused(found, "batched gradient"):
        torch.autograd.grad(made, leaves, several, is_grads_batched=True)


@EVERY
def test_forward_mode_and_transforms_are_refused(operator, found, case):
    some, outputs = drawn(operator, found, case)
    for at in range(len(some)):
        with forward_ad.dual_level(), refused(found, "derivative in forward mode"):
            given = list(some)
            given[at] = forward_ad.make_dual(given[at], torch.ones_like(given[at]))
            outputs(*given)
    with forward_ad.dual_level():  # where nothing has a tangent it runs
        outputs(*some)
    loss, ones = partial(squares, outputs), tuple(map(torch.ones_like, some))
    transformed = [
        lambda: torch.func.jvp(loss, tuple(some), ones),
        lambda: torch.func.vmap(loss)(*(x[None] for x in some)),
    ]
    if found.differentiable:  # an operator that gives no gradient says that
        transformed.append(lambda: torch.func.grad(loss)(*some))
    for run in transformed:
        with refused(found, "result under torch.func"):
            run()


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("route", ["plain", "subclass", "mode", "compiled"])
def test_arriving_gradients_are_plain_ones_on_every_route(route):
    x, weight = torch.randn(3, 16, **ON), torch.randn(16, **ON)
    function = partial(rms_norm, weight=weight, implementation="fused")
    if route == "subclass":
        x = x.as_subclass(Subclass)
    if route == "compiled":
        function = torch.compile(function, backend="aot_eager")
    x.requires_grad_()
    with FlopCounterMode(display=False) if route == "mode" else nullcontext():
        y, z = function(x), function(x)
    with pytest.raises(RuntimeError, match="'fused' gives no batched gradient"):
        torch.autograd.grad(y, x, torch.ones(2, 3, 16, **ON), is_grads_batched=True)
    one = torch.ones(3, 16, **ON)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="'fused' gives no derivative"):
        torch.autograd.grad(z, x, forward_ad.make_dual(one, one), retain_graph=True)
    (dx,) = torch.autograd.grad(z, x, one)
    (expected,) = torch.autograd.grad(rms_norm(x, weight), x, one)
    torch.testing.assert_close(dx, expected)


def test_a_gradient_with_a_graph_is_right_and_so_is_a_functionalized_result():
    x, weight = torch.randn(3, 16, **ON, requires_grad=True), torch.randn(16, **ON)
    found = []
    for name in ("torch", "fused"):
        loss = rms_norm(x, weight, implementation=name).square().sum()
        found += torch.autograd.grad(loss, x, create_graph=True)
    torch.testing.assert_close(found[1].detach(), found[0].detach())
    torch.autograd.grad(found[0].sum(), x)  # PyTorch's form has a second one
    function = partial(rms_norm, weight=weight, implementation="fused")
    torch.testing.assert_close(torch.func.functionalize(function)(x.detach()), function(x))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, "dual numbers"])
def test_a_compiler_says_the_sentence(transform):
    weight = torch.randn(16, **ON)

    def norms(x):
        return rms_norm(x, weight, implementation="fused").sum()

    function = norms if isinstance(transform, str) else transform(norms)
    x = torch.randn(16, **ON) if transform is torch.func.grad else torch.randn(3, 16, **ON)
    with forward_ad.dual_level(), pytest.raises(Exception, match="'fused' gives no"):
        x = forward_ad.make_dual(x, x.clone()) if function is norms else x
        torch.compile(function, backend="aot_eager")(x)


@EVERY
def test_a_flop_counter_counts_the_work(operator, found, case):
    some, outputs = drawn(operator, found, case)
    leaves = [x.requires_grad_(found.differentiable) for x in some]
    passes = ["forward", "backward"] if found.differentiable else ["forward"]
    with FlopCounterMode(display=False) as counter:
        made = [x for x in outputs(*leaves) if x.requires_grad]
        if made:
            torch.autograd.backward(made, [torch.ones_like(x) for x in made])
    work = found.work or operator.work
    plain = Case(case.problem)  # values, as lengths of packed sequences, are not read
    assert counter.get_total_flops() == sum(
        int(sum(work(plain, pass_).flops.values())) for pass_ in passes
    )
