"""Tests what operators that multiply declare: cases, work, broken references."""

import subprocess
import sys

import pytest
import torch

from tnp.dispatch import devices
from tnp.dispatch.registry import catalog
from tnp.dispatch.selection import describe
from tnp.dispatch.spec import Case
from tnp.ops._shared.random_values import Random

MODEL = {"d_model": 512, "d_ff": 1365, "d_ff_storage": 1408, "n_components": 10, "n_heads": 8}
RUN = {"batch": 4, "n_context": 1000, "n_target": 100, "dtype": "bfloat16"}


def drawn(case: Case, device: str) -> tuple[torch.Tensor | None, ...]:
    operator = catalog().operator(case.problem.op)
    tensors = operator.draw(case, Random(case, torch.device(device)))
    assert tensors.keys() <= {*operator.tensors, *(f"d{name}" for name in operator.outputs)}
    return tuple(tensors.get(name) for name in operator.tensors)


@pytest.mark.parametrize("op", catalog().operators)
@pytest.mark.parametrize("target", [devices.named("H200"), devices.INTERPRETER])
def test_a_case_draws_the_problem_that_it_is_of(op, target):
    operator = catalog().operator(op)
    in_model = operator.within(MODEL, RUN)
    for case in [*operator.cases(target), *([Case(in_model)] if in_model else [])]:
        inputs, options = drawn(case, "meta"), operator.call_options(case.problem)
        assert describe(operator, inputs, options, (), target).problem == case.problem
        assert operator.from_json(case.problem.json) == case.problem


@pytest.mark.parametrize("name", ["mlp", "mixture_heads"])
def test_padding_is_drawn_as_zeros(name):
    operator = catalog().operator(name)
    case = next(case for case in operator.cases(devices.INTERPRETER) if case["d_ff_real"])
    _x, up, down = drawn(case, "cpu")
    real = case["d_ff_real"]
    for weight, dim in ((up, -2), (down, -1)):
        padding = weight.narrow(dim, real, weight.shape[dim] - real)
        assert (padding == 0).all() and (weight.narrow(dim, 0, real) != 0).all()


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_work_counts_products_and_tensors(pass_):
    mlp, heads = (
        Case(catalog().operator(name).within(MODEL, RUN), (("d_ff_real", 1365),))
        for name in ("mlp", "mixture_heads")
    )
    passes = {"forward": 1, "backward": 2}[pass_]
    found = catalog().operator("mlp").work(mlp, pass_)
    rows, weights = 4400 * 512 * 2, 2 * 512 * 1408 * 4
    assert found.flops == {"bfloat16": passes * 4 * 4400 * 512 * 1365}
    assert found.bytes == (1 + passes) * rows + passes * weights
    found = catalog().operator("mixture_heads").work(heads, pass_)
    x, y, weights = 400 * 512 * 2, 400 * 10 * 3 * 2, 10 * 1408 * (512 + 3) * 4
    assert found.flops == {"bfloat16": passes * 2 * 400 * 10 * 1365 * (512 + 3)}
    assert found.bytes == passes * (x + weights) + y


@pytest.mark.parametrize("op", [op for op in catalog().operators if "eager" in catalog().names(op)])
def test_the_formula_in_single_operations_is_the_reference(op):
    operator, eager = catalog().operator(op), catalog().load(op, "eager")
    for case in operator.cases(devices.INTERPRETER):
        if case.problem.dtype != "float32":
            continue
        arguments = *drawn(case, "cpu"), *operator.numbers
        exact = operator.reference(*(x.double() if torch.is_tensor(x) else x for x in arguments))
        torch.testing.assert_close(
            eager.run(*arguments), exact, rtol=1e-4, atol=1e-4, check_dtype=False
        )


def test_planning_imports_neither_torch_nor_triton():
    modules = "tnp.ops.mlp, tnp.ops.mixture_heads, tnp.ops.projection"
    code = f"import sys, {modules}; assert not {{'torch', 'triton'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


TOKENS = {"batch": 8, "n_tokens": 2048, "dtype": "bfloat16"}
CACHED = TOKENS | {"n_tokens": 1, "n_cached": 4097}
LLAMA = {"n_heads": 32, "n_kv_heads": 8, "head_dim": 128, "d_model": 4096, "vocabulary": 128_256}
ROPED, GPT2 = LLAMA | {"rope": True}, {"d_model": 768, "d_ff": 3072, "activation": "gelu_tanh"}
IN_MODELS = [
    ("layer_norm", {"norm": "layer", "d_model": 768}, TOKENS, {"rows": 16_384, "width": 768}),
    ("layer_norm", {"norm": "rms", "d_model": 768}, TOKENS, None),
    ("layer_norm", {"d_model": 512}, TOKENS, None),
    ("rms_norm", {"norm": "rms", "d_model": 4096}, TOKENS, {"rows": 16_384, "width": 4096}),
    ("rms_norm", {"norm": "layer", "d_model": 768}, TOKENS, None),
    ("add_rms_norm", {"d_model": 512}, RUN, {"rows": 4400, "width": 512}),
    ("rope", ROPED, TOKENS, {"kv_heads": 8}),
    ("rope", LLAMA, TOKENS, None),
    ("rope", ROPED | {"qk_norm": True}, TOKENS, None),
    ("qk_norm_rope", ROPED | {"qk_norm": True}, TOKENS, {"kv_heads": 8}),
    ("qk_norm_rope", ROPED | {"qk_norm": False}, TOKENS, None),
    ("gelu_linear", GPT2, TOKENS, {"rows": 16_384, "n_in": 768, "n_out": 3072}),
    ("gelu_linear", GPT2 | {"activation": "silu_gated"}, TOKENS, None),
    ("attention", LLAMA, TOKENS, {"n_q": 2048, "n_k": 2048, "n_kv_heads": 8, "causal": True}),
    (
        "attention",
        LLAMA | {"n_kv_heads": 32, "window": 30},
        TOKENS,
        {"n_kv_heads": 0, "window": 30},
    ),
    ("attention", {"d_model": 4096}, TOKENS, None),
    ("decode_attention", LLAMA, CACHED, {"n_keys": 4097, "page": 4097, "page_table": False}),
    ("decode_attention", LLAMA, CACHED | {"page": 256}, {"n_keys": 4352, "page_table": True}),
    ("decode_attention", LLAMA | {"window": 4097}, CACHED, {"n_keys": 4097}),
    ("decode_attention", {"n_heads": 8, "d_model": 512}, CACHED, None),
]


@pytest.mark.parametrize("name, model, run, expected", IN_MODELS)
def test_a_model_has_the_problem_of_its_sizes(name, model, run, expected):
    problem = catalog().operator(name).within(model, run)
    if expected is None:
        assert problem is None
    else:
        assert {size: problem[size] for size in expected} == expected


def test_a_window_that_ends_before_the_cache_is_refused():
    within = catalog().operator("decode_attention").within
    with pytest.raises(ValueError, match="a window of 4096 tokens, and n_cached is 4097: it takes"):
        within(LLAMA | {"window": 4096}, CACHED)
    with pytest.raises(KeyError, match="n_cached"):
        within(LLAMA, TOKENS)
