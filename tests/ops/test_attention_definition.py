"""Tests attention's declaration: its cases, its work, its part of a reference."""

import pytest
import torch

from tnp.dispatch import devices
from tnp.ops._shared.random_values import Random
from tnp.ops.attention import OPERATOR, cases, definition
from tnp.ops.attention.torch_forms import visible

CPU = torch.device("cpu")
SCALE = OPERATOR.numbers
CASES = list(OPERATOR.cases(devices.CPU))


def drawn(case, device=CPU) -> tuple:
    tensors = OPERATOR.draw(case, Random(case, device))
    return tuple(tensors.get(name) for name in OPERATOR.tensors)


def test_a_case_has_sizes_options_and_values_to_draw():
    case = OPERATOR.case("float32", 2, 3, 4, 5, 16, lengths="1,5", n_keys=True, magnitude=2.0)
    sizes = {"batch": 2, "n_heads": 3, "n_q": 4, "n_k": 5, "head_dim": 16}
    assert case.problem == OPERATOR.problem("float32", **sizes, n_keys=True)
    assert case.draw == (("lengths", "1,5"), ("magnitude", 2.0))
    with pytest.raises(ValueError, match="shorter"):
        OPERATOR.case("float32", 2, 3)


def outputs_of(case, function, inputs) -> dict:
    """Returns outputs by name of a function that is called as the reference is."""
    found = function(*inputs, *SCALE, **dict(OPERATOR.call_options(case.problem)))
    found = found if isinstance(found, tuple) else (found,)
    return dict(zip(OPERATOR.outputs_of(case.problem), found, strict=True))


@pytest.mark.parametrize("implementation", OPERATOR.implementations, ids=lambda one: one.name)
def test_a_gate_has_the_controls_of_the_options_that_are_taken(implementation):
    found = OPERATOR.controls_for(implementation)
    for option, controls in cases.CONTROLS_OF.items():
        assert (option in implementation.options) == (controls.keys() <= found.keys())
    assert cases.CONTROLS.keys() <= found.keys()


@pytest.mark.parametrize("case", [one for one in CASES if one["magnitude"] < 12], ids=str)
def test_a_spot_is_the_formula_of_the_first_and_the_last_head(case, monkeypatch):
    monkeypatch.setattr(
        definition, "SCORES_AT_ONCE", 6 * case.problem["n_k"]
    )  # three queries at most
    inputs = dict(zip(OPERATOR.tensors, drawn(case), strict=True))
    exact = {name: x.double() if name in "qkv" else x for name, x in inputs.items()}
    for name in "qkv":
        exact[name] = exact[name].detach().requires_grad_()
    whole = outputs_of(case, OPERATOR.reference, exact.values())
    arriving = {name: torch.randn_like(x) for name, x in whole.items()}
    leaves = [exact[name] for name in "qkv"]
    gradients = torch.autograd.grad(list(whole.values()), leaves, list(arriving.values()))
    whole |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    found = definition.partial_reference(case, inputs, None) | definition.partial_reference(
        case, inputs, arriving
    )
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


LLAMA = {"n_heads": 32, "n_kv_heads": 8, "head_dim": 128, "d_model": 4096}
TOKENS = {"dtype": "bfloat16", "batch": 2, "n_tokens": 100}


PACKED = TOKENS | {"batch": 1, "draw": {"lengths": "40,0,60"}}


def test_a_run_of_packed_sequences():
    problem = OPERATOR.within(LLAMA, PACKED)
    sizes = {"batch": 1, "n_heads": 32, "n_q": 100, "n_k": 100, "head_dim": 128}
    kind = {"n_kv_heads": 8, "causal": True, "n_sequences": 3}
    packed = {"cu_seqlens_q": True, "cu_seqlens_k": True}
    assert problem == OPERATOR.problem("bfloat16", **sizes, **kind, **packed)
    case = definition.Case(problem, tuple(PACKED["draw"].items()))
    assert drawn(case)[4].tolist() == [0, 40, 40, 100]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"n_tokens": 101}, "lengths are 100 in all: they must be n_tokens, 101"),
        ({"batch": 2}, "batch is 2: packed sequences lie in a batch of 1"),
        ({"n_cached": 200}, "its tokens see cached keys: use operator decode_attention"),
    ],
)
def test_a_run_that_cannot_be_is_one_sentence(change, sentence):
    with pytest.raises(ValueError) as raised:
        OPERATOR.within(LLAMA, PACKED | change)
    assert str(raised.value) == sentence


KINDS = [case for case in CASES if case.problem["causal"] or case.problem["window"]]


@pytest.mark.parametrize("case", [*KINDS, *CASES[-5:]], ids=str)
def test_work_is_that_of_the_keys_that_are_seen(case):
    p, inputs = case.problem, drawn(case)
    seen = visible(*inputs[:2], None, *inputs[4:], p["causal"], p["window"])
    pairs = p["n_q"] * p["n_k"] if seen is None else int(seen.sum())
    heads, row = p["batch"] * p["n_heads"], p["head_dim"] * p.itemsize
    keys = p["batch"] * (p["n_kv_heads"] or p["n_heads"]) * p["n_k"]
    forward, backward = (OPERATOR.work(case, name) for name in ("forward", "backward"))
    assert forward.flops == {p.dtype: 4 * heads * pairs * p["head_dim"]}
    assert backward.flops == {p.dtype: 10 * heads * pairs * p["head_dim"]}
    assert forward.bytes == row * (2 * heads * p["n_q"] + 2 * keys)


def test_lengths_of_packed_sequences():
    """Lengths are those that a case names, or as equal as can be."""
    given = {"cu_seqlens_q": True, "cu_seqlens_k": True, "n_sequences": 3}
    sizes = 1, 2, 17, 20, 16
    cases = {
        "equal": OPERATOR.case("float32", *sizes, **given),
        "named": OPERATOR.case("float32", *sizes, **given, lengths="5,0,12", key_lengths="7,9,4"),
    }
    of = {
        name: [definition.packed_lengths(case, side) for side in ("n_q", "n_k")]
        for name, case in cases.items()
    }
    assert of == {"equal": [[5, 6, 6], [6, 7, 7]], "named": [[5, 0, 12], [7, 9, 4]]}
    cu_q, cu_k = drawn(cases["named"])[4:]
    assert cu_q.tolist() == [0, 5, 5, 17] and cu_k.tolist() == [0, 7, 16, 20]
