"""Derivatives that operators of ours do not have: one sentence of each, on every route."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd import functional as of_function
from torch.utils.flop_counter import FlopCounterMode

from tests.ops.problems import DEVICE, HERE
from tnp import dispatch
from tnp.catalog import catalog
from tnp.contract import Call, Case, Implementation, Operator
from tnp.gates.results import wanted_of
from tnp.ops.rms_norm import rms_norm
from tnp.ops.swiglu import swiglu
from tnp.values import Random


def smallest(operator: Operator, found: Implementation) -> Case | None:
    """The case of the gate with the fewest numbers that an implementation serves here."""

    def served(case: Case) -> bool:
        what = Call(case.problem, HERE, wanted_of(operator, found, case))
        none = 0 in dict(case.problem.sizes).values() or case["forward_only"]
        return not none and found.refuses(what) is None

    def extent(case: Case) -> int:
        return math.prod(size for _, size in case.problem.sizes)

    return min(filter(served, operator.cases(HERE)), key=extent, default=None)


def of_every_operator() -> list:
    """The last implementation of ours that runs here: routes are the operator's."""
    found = []
    for operator in catalog().operators.values():
        ours = [one for one in operator.implementations if one.forward is not None]
        cases = [(one, smallest(operator, one)) for one in ours]
        served = [(one, case) for one, case in cases if case is not None]
        if served:
            found.append(pytest.param(operator, *served[-1], id=operator.name))
    return found


EVERY = pytest.mark.parametrize(("operator", "found", "case"), of_every_operator())
Outputs = Callable[..., list[torch.Tensor]]


def drawn(operator: Operator, found: Implementation, case: Case) -> tuple[list, Outputs]:
    """Differentiable inputs of a case, or all floats where there are none; outputs of these."""
    values = operator.draw(case, Random(case, DEVICE))
    inputs = {name: values.get(name) for name in operator.tensors}
    wanted = wanted_of(operator, found, case) or tuple(
        name for name, x in inputs.items() if x is not None and x.is_floating_point()
    )

    def outputs(*some: torch.Tensor) -> list[torch.Tensor]:
        given = inputs | dict(zip(wanted, some, strict=True))
        options = operator.call_options(case.problem)
        made = dispatch.call(operator, found.name, tuple(given.values()), operator.numbers, options)
        return [x.float() for x in (made if isinstance(made, tuple) else (made,))]

    return [inputs[name].detach() for name in wanted], outputs


def squares(outputs: Outputs, *some: torch.Tensor) -> torch.Tensor:
    return sum(x.square().sum() for x in outputs(*some))


def refused(found: Implementation, what: str):
    return pytest.raises(RuntimeError, match=f"'{found.name}' gives no {what}.*'torch'")


@EVERY
def test_a_second_derivative_is_refused(operator, found, case):
    if not found.differentiable:
        return
    some, outputs = drawn(operator, found, case)
    leaves = [x.requires_grad_() for x in some]
    with refused(found, "second derivative"):
        first = torch.autograd.grad(squares(outputs, *leaves), leaves, create_graph=True)
        torch.autograd.grad(sum(x.float().square().sum() for x in first), leaves)
    # What hands it to `torch.autograd.functional`, which allows for inputs that are not used.
    with refused(found, "second derivative"):
        vectors = tuple(map(torch.ones_like, some))
        of_function.hvp(partial(squares, outputs), tuple(x.detach() for x in some), vectors)


@EVERY
def test_forward_mode_is_refused(operator, found, case):
    some, outputs = drawn(operator, found, case)
    for at in range(len(some)):
        with forward_ad.dual_level(), refused(found, "derivative in forward mode"):
            given = list(some)
            given[at] = forward_ad.make_dual(given[at], torch.ones_like(given[at]))
            outputs(*given)
    with forward_ad.dual_level():  # where nothing has a tangent it runs
        outputs(*some)


@EVERY
def test_transforms_are_refused(operator, found, case):
    some, outputs = drawn(operator, found, case)
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


@EVERY
def test_batched_gradients_are_refused(operator, found, case):
    if not found.differentiable:
        return
    some, outputs = drawn(operator, found, case)
    leaves = [x.requires_grad_() for x in some]
    made = [x for x in outputs(*leaves) if x.requires_grad]
    several = [torch.ones(2, *x.shape, device=x.device) for x in made]
    with refused(found, "batched gradient"):
        torch.autograd.grad(made, leaves, several, is_grads_batched=True)


def test_a_gradient_with_a_graph_is_right():
    x, weight = torch.randn(3, 16, requires_grad=True), torch.randn(16)
    found = []
    for name in ("torch", "fused"):
        loss = rms_norm(x, weight, implementation=name).square().sum()
        found += torch.autograd.grad(loss, x, create_graph=True)
    torch.testing.assert_close(found[1].detach(), found[0].detach())
    torch.autograd.grad(found[0].sum(), x)  # PyTorch's form has a second one


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, "dual numbers"])
def test_a_compiler_says_the_sentence(transform):
    weight = torch.randn(16)

    def norms(x):
        return rms_norm(x, weight, implementation="fused").sum()

    function = norms if isinstance(transform, str) else transform(norms)
    x = torch.randn(16) if transform is torch.func.grad else torch.randn(3, 16)
    with forward_ad.dual_level(), pytest.raises(Exception, match="'fused' gives no"):
        x = forward_ad.make_dual(x, x.clone()) if function is norms else x
        torch.compile(function, backend="aot_eager")(x)


def test_functionalization_changes_nothing():
    x, weight = torch.randn(3, 16), torch.randn(16)
    function = partial(rms_norm, weight=weight, implementation="fused")
    torch.testing.assert_close(torch.func.functionalize(function)(x), function(x))


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


AUTOCAST = [torch.bfloat16, torch.float16]


@EVERY
def test_autocast_changes_nothing(operator, found, case):
    some, outputs = drawn(operator, found, case)
    leaves = [x.requires_grad_(found.differentiable) for x in some]

    def results() -> list[torch.Tensor]:
        made = outputs(*leaves)
        wanted = [x for x in made if x.requires_grad]
        ones = [torch.ones_like(x) for x in wanted]
        return made + list(torch.autograd.grad(wanted, leaves, ones) if wanted else [])

    expected = results()
    for dtype in AUTOCAST:
        with torch.autocast(DEVICE.type, dtype):
            torch.testing.assert_close(results(), expected, rtol=0, atol=0, equal_nan=True)


def test_autocast_around_a_compiled_operator_changes_nothing():
    gate, up = torch.randn(2, 3, 20)
    compiled = torch.compile(partial(swiglu, implementation="triton"), backend="aot_eager")
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert torch.equal(compiled(gate, up), swiglu(gate, up, implementation="triton"))
