"""What the declaration says of attention: cases that are what they say, and controls that fail."""

import pytest
import torch

from tnp import selection, targets
from tnp.gates.checks import distance
from tnp.ops.attention import OPERATOR, definition
from tnp.values import Random

CPU = torch.device("cpu")
SCALE = OPERATOR.numbers
CASES = list(OPERATOR.cases(targets.CPU))


def drawn(case, device=CPU) -> tuple:
    tensors = OPERATOR.draw(case, Random(case, device))
    return tuple(tensors[name] for name in OPERATOR.tensors)


@pytest.mark.parametrize("gpu", [None, "H200"])
def test_what_is_drawn_is_the_problem(gpu):
    cases = CASES if gpu is None else OPERATOR.cases(targets.named(gpu))
    for case in cases:
        inputs = drawn(case, torch.device("meta"))
        options = OPERATOR.call_options(case.problem)
        found = selection.describe(OPERATOR, inputs, options, target=targets.CPU)
        assert found.problem == case.problem
        assert selection.aligned(inputs), case


def test_a_case_has_sizes_in_order_options_and_what_is_drawn():
    case = OPERATOR.case("float32", 2, 3, 4, 5, 16, lengths="1,5", n_keys=True, magnitude=2.0)
    sizes = {"batch": 2, "n_heads": 3, "n_q": 4, "n_k": 5, "head_dim": 16}
    assert case.problem == OPERATOR.problem("float32", **sizes, n_keys=True)
    assert case.draw == (("lengths", "1,5"), ("magnitude", 2.0))
    with pytest.raises(ValueError, match="shorter"):
        OPERATOR.case("float32", 2, 3)


# At larger magnitudes one key has all the weight of a query, and the first one may have none.
SHARED = [case for case in CASES if dict(case.draw).get("magnitude", 1.0) < 12]


@pytest.mark.parametrize("case", SHARED, ids=str)
def test_controls_are_further_off_than_any_rounding(case):
    inputs, options = drawn(case), dict(OPERATOR.call_options(case.problem))
    doubles = [x.double() if i < 3 else x for i, x in enumerate(inputs)]
    exact = OPERATOR.reference(*doubles, *SCALE, **options)
    own = distance(OPERATOR.reference(*inputs, *SCALE, **options), exact)
    floor = OPERATOR.condition(case, dict(zip(OPERATOR.tensors, inputs, strict=True)))
    allowed = OPERATOR.budget.outputs * max(own, floor["o"] * exact.norm().item())
    assert set(floor) == {"o", "dq", "dk", "dv"} and 0 < floor["o"] < 0.1
    for name, broken in definition.CONTROLS.items():
        if name == "base2 and scaled all the same" and not options:
            continue
        found = distance(broken(*inputs, *SCALE, **options), exact)
        assert not found <= allowed, name  # NaN is further off than anything


@pytest.mark.parametrize("case", SHARED[:6] + SHARED[-2:], ids=str)
def test_a_spot_is_the_formula_of_the_first_and_the_last_head(case, monkeypatch):
    monkeypatch.setattr(definition, "SCORES_AT_ONCE", 6 * case.problem["n_k"])  # three queries
    inputs = dict(zip(OPERATOR.tensors, drawn(case), strict=True))
    exact = {name: x.double() if name in "qkv" else x for name, x in inputs.items()}
    for name in "qkv":
        exact[name] = exact[name].detach().requires_grad_()
    options = dict(OPERATOR.call_options(case.problem))
    o = OPERATOR.reference(*exact.values(), *SCALE, **options)
    do = torch.randn_like(o)
    gradients = torch.autograd.grad(o, [exact[name] for name in "qkv"], do)
    whole = {"o": o} | dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    found = definition.spot(case, inputs, None) | definition.spot(case, inputs, {"o": do})
    assert found.keys() == whole.keys()
    for name, (index, part) in found.items():
        assert part.shape[0] == 2 and not part.requires_grad
        torch.testing.assert_close(part, whole[name][index].detach(), rtol=1e-9, atol=1e-12)


def test_work_of_a_layer():
    run = {"dtype": "bfloat16", "batch": 4, "n_context": 10_000, "n_target": 1_000}
    problem = OPERATOR.within({"n_heads": 8, "d_model": 512}, run)
    assert dict(problem.sizes) == {
        "batch": 4, "n_heads": 8, "n_q": 11_000, "n_k": 10_000, "head_dim": 64,
    }  # fmt: skip
    (case,) = [definition.Case(problem)]
    forward, backward = (OPERATOR.work(case, name) for name in ("forward", "backward"))
    assert forward.flops == {"bfloat16": 4 * 32 * 11_000 * 10_000 * 64}
    assert backward.flops["bfloat16"] == 2.5 * forward.flops["bfloat16"]
    assert forward.bytes == 2 * 32 * 64 * (2 * 11_000 + 2 * 10_000)
