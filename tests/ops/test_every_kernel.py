"""Tests what kernels of all operators have in common: configurations, layouts, sizes of zero.

The catalog says which operators there are, so a new one is tested without a word here.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle, islice

import pytest
import torch

from tests.ops.every_operator import EVERY, drawn
from tests.ops.problems import DEVICE, HERE, assert_within_budget, by, unexpected
from tnp.dispatch import devices, selection
from tnp.dispatch.registry import catalog
from tnp.dispatch.spec import Call, Case, Implementation, Operation, Operator
from tnp.gates.forced import Forced, Form, Pair
from tnp.gates.results import Results, Setting, wanted_of

GPUS = devices.named("H200"), devices.named("A100")
# Cases on both sides of the tiles of configurations. Other operators: the largest of the gate.
RAGGED = {
    "softmax": [("float32", 33, 60, {"start": 1, "magnitude": 4.0}), ("float32", 13, 1, {})],
    "layer_norm": [("float32", 33, 60, {"start": 1}), ("float32", 13, 3, {})],
    "rms_norm": [("float32", 33, 60, {"start": 1}), ("float32", 13, 1, {})],
    "add_rms_norm": [("float32", 33, 60, {"start": 1}), ("float32", 13, 1, {})],
    "row_sum": [("float32", 33, 60, {"start": 1}), ("float32", 3, 2050, {})],
    "rms_norm_linear": [
        ("float32", 35, 600, 70, {"start": 1, "silu": True}), ("bfloat16", 35, 48, 70, {}),
    ],
    "buffered_attention": [
        (dtype, 1, 1, 17 + 2 * n + 9, 17 + n, 32, n, {"n_groups": 1, "all_rows": True})
        for dtype, n in (("float32", 70), ("bfloat16", 70), ("bfloat16", 20))
    ],
    "matmul": [("bfloat16", 20, 24, 72, {})],
    "gelu_linear": [("float32", 70, 5, 130, {})],
    "linear": [("bfloat16", 3, 1100, 17, {})],
    "cross_entropy": [("float32", 65, 16, {}), ("bfloat16", 2, 4097, {}), ("float32", 2, 4095, {})],
    "linear_cross_entropy": [("float32", 33, 12, 257, {}), ("bfloat16", 17, 12, 257, {})],
    "qk_norm_rope": [("float32", 2, 4, 2, 67, 16, {})],
    "attention": [
        ("bfloat16", 2, 1, 150, 61, 64, {"n_keys": True, "lengths": "50,7"}),
        ("bfloat16", 1, 1, 150, 125, 64, {"n_keys": True, "lengths": "109"}),
        ("bfloat16", 1, 1, 70, 64, 64, {}),
        ("bfloat16", 1, 1, 70, 250, 64, {}),
        ("float32", 1, 2, 70, 40, 64, {"lse": True}),
    ],
}  # fmt: skip


each_operator = pytest.mark.parametrize(
    "operator", catalog().operators.values(), ids=lambda operator: operator.name
)


def serves(operator: Operator, found: Implementation, case: Case) -> bool:
    return found.refuses(Call(case.problem, HERE, wanted_of(operator, found, case))) is None


def ours(operator: Operator, case: Case) -> list[Implementation]:
    """Returns the implementations of ours with kernels that serve a case here."""
    own = [one for one in operator.implementations if one.forward is not None]
    return [one for one in own if serves(operator, one, case)]


def ragged(operator: Operator) -> list[Case]:
    """Returns the cases of RAGGED, or the gate's largest of each dtype."""
    if operator.name in RAGGED:
        return [operator.case(*sizes, **named) for *sizes, named in RAGGED[operator.name]]
    cases = sorted(operator.cases(HERE), key=lambda one: operator.work(one, "forward").bytes)
    return list({one.problem.dtype: one for one in cases if ours(operator, one)}.values())


def pairs(found: Implementation, what: Call, tried: set[Form]) -> Iterator[Pair]:
    """Yields pairs of kernels in which each has each of its configurations that is not tried."""

    def able(operation: Operation, saves: str | None = None) -> list[Form]:
        """Returns a kernel's default and every other configuration that it has here or on GPUs."""
        found = []
        for kernel in selection.kernels_of(operation, saves).values():
            if kernel.refuses(what) is None:
                targets = what, *(replace(what, target=gpu) for gpu in GPUS)
                configs = dict.fromkeys(one for call in targets for one in kernel.configs(call))
                default, *others = (Form(kernel, config) for config in configs)
                found += [default, *(form for form in others if form not in tried)]
        return found

    forward = able(found.forward)
    for saves in dict.fromkeys(form.kernel.saves for form in forward):
        both = [[form for form in forward if form.kernel.saves == saves]]
        both += [able(found.backward, saves)] if what.wanted else []
        most = max(map(len, both))
        for pair in zip(*(islice(cycle(one), most) for one in both), strict=True):
            tried.update(pair)
            yield Pair(*pair)


@pytest.mark.blas
@each_operator
def test_every_configuration_is_within_its_budget(operator):
    """Each runs in the first case that it serves, and a kernel's first one in every case."""
    tried: set[Form] = set()
    for case in ragged(operator):
        for found in ours(operator, case):
            setting = Setting.of(operator, found, case, DEVICE)
            for pair in pairs(found, Call(case.problem, HERE, setting.wanted), tried):
                assert_within_budget(setting, Forced(setting, pair, setting.wanted).results())


def beside(x: torch.Tensor) -> torch.Tensor:
    """Returns x in rows that lie further apart, and begin at no multiple of 16 bytes.

    Elements of a vector lie further apart.
    """
    if x.dim() == 1:
        return x.repeat_interleave(2)[::2]
    wide = x.new_zeros(*x.shape[:-1], x.shape[-1] + 3)
    wide[..., 1:-2] = x
    return wide[..., 1:-2]


# Module test_far_strides tests dimensions that lie far apart, columns among them.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "heads last": lambda x: x.movedim(0, -2).contiguous().movedim(-2, 0),
    "rows apart": beside,
    "expanded": lambda x: x[:1].expand_as(x),
}


def laid_out(inputs: dict, layout: str) -> dict[str, torch.Tensor]:
    """Returns the inputs that can have a layout, in that layout."""
    least = 2 if layout == "heads last" else 1
    return {
        name: LAYOUTS[layout](x)
        for name, x in inputs.items()
        if x is not None and x.dim() >= least and x.is_floating_point()
    }


def each_taken(run: Callable, moved: dict) -> Iterator[tuple[dict, Results]]:
    """Yields results of tensors together, or one by one where a sentence refuses some."""
    try:
        yield moved, run(moved)
    except ValueError as refused:
        assert "contiguous" in str(refused), refused
        for name, x in moved.items() if len(moved) > 1 else ():
            yield from each_taken(run, {name: x})


def n_of_one(case: Case) -> int:
    return sum(size == 1 for _, size in case.problem.sizes)


@pytest.mark.parametrize("layout", LAYOUTS)
@each_operator
def test_inputs_may_lie_anyhow(operator, layout):
    """A layout gives the results of contiguous copies, or is refused in a sentence."""
    cases = sorted(operator.cases(HERE), key=n_of_one)
    served = ((one, case) for case in cases for one in reversed(ours(operator, case)))
    found, case = next(pair for pair in served if not pair[0].precision)
    of = unexpected(operator, found, case)

    def run(moved: dict) -> Results:
        return by(replace(of, inputs=of.inputs | moved), found.name)

    for moved, got in each_taken(run, laid_out(of.inputs, layout)):
        expected = run({name: x.contiguous() for name, x in moved.items()})
        for name, x in expected.items():
            torch.testing.assert_close(got[name], x, rtol=1e-2, atol=1e-4)


EMPTY = {"attention": ["n_q"], "softmax": ["rows", "width"], "row_sum": ["rows", "width"]}


@each_operator
def test_a_size_of_zero_gives_pytorchs_results(operator):
    if operator.name == "mixture_nll":
        pytest.skip("the mean of no target is refused")
    first = ragged(operator)[0]
    sizes = dict(first.problem.sizes)
    leading = next(name for name in ("batch", "rows", "m") if name in sizes)
    for empty in EMPTY.get(operator.name, [leading]):
        case = Case(replace(first.problem, sizes=tuple((sizes | {empty: 0}).items())))
        for found in ours(operator, first):
            of = unexpected(operator, found, case)
            expected = by(of, operator.implementations[0].name)
            for name, x in by(of, found.name).items():
                torch.testing.assert_close(x, expected[name], equal_nan=True, check_dtype=False)


@each_operator
def test_a_gradient_has_its_inputs_dtype(operator):
    """Parameters in bfloat16 give what the same numbers give in float32."""
    cases = [one for one in operator.cases(HERE) if one.problem.dtype == "bfloat16"]
    for found in {one.name: one for case in cases for one in ours(operator, case)}.values():
        case = next(one for one in sorted(cases, key=n_of_one) if serves(operator, found, one))
        of = unexpected(operator, found, case)
        small = {name: of.inputs[name].bfloat16() for name in of.wanted}
        same = {name: x.to(of.inputs[name].dtype) for name, x in small.items()}
        try:
            got = by(replace(of, inputs=of.inputs | small), found.name)
        except ValueError as refused:
            assert "it must be float32" in str(refused), refused
            continue
        for name, x in by(replace(of, inputs=of.inputs | same), found.name).items():
            of_input = small.get(name.removeprefix("d"))
            assert of_input is None or got[name].dtype == of_input.dtype, name
            torch.testing.assert_close(got[name].float(), x.float(), rtol=2e-2, atol=1e-2)


class Silent(torch.autograd.Function):
    """Returns its input, and passes no gradient on."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return None


@EVERY
def test_no_gradient_comes_of_none(operator, found, case):
    if not operator.differentiated or not found.differentiable:
        pytest.skip("it gives no gradient")
    inputs, outputs = drawn(operator, found, case)
    scale = torch.ones((), requires_grad=True, device=DEVICE)
    given = outputs(*(x * scale.to(x.dtype) for x in inputs))
    (sum(Silent.apply(x).sum() for x in given) + scale).backward()
    # Nothing, or zeros: what autograd puts in place of a gradient that is not there.
    assert scale.grad == 1.0
