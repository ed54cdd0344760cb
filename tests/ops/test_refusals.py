"""Tests that wrong arguments of every operator end in one sentence, which names the value."""

import pytest
import torch

from tests.ops.every_operator import EVERY
from tests.ops.problems import DEVICE
from tnp.dispatch.call import call
from tnp.ops import products, rope
from tnp.ops._shared.random_values import Random
from tnp.ops.attention import attention
from tnp.ops.buffered_attention import buffered_attention
from tnp.ops.cross_entropy import cross_entropy
from tnp.ops.decode_attention import decode_attention
from tnp.ops.embedding import embed_rows
from tnp.ops.layer_norm import layer_norm
from tnp.ops.linear_cross_entropy import linear_cross_entropy
from tnp.ops.mixture_heads import mixture_heads
from tnp.ops.mixture_nll import mixture_nll
from tnp.ops.mlp import mlp
from tnp.ops.projection import linear, project_qkv
from tnp.ops.quantized_linear import quantized_linear
from tnp.ops.rms_norm import add_rms_norm, rms_norm
from tnp.ops.rms_norm_linear import rms_norm_linear
from tnp.ops.rms_norm_swiglu import rms_norm_swiglu
from tnp.ops.softmax import softmax
from tnp.ops.transformer_block import WEIGHTS, transformer_block

# Names in sentences where an operator calls a part, or takes a dtype in place of a tensor.
RENAMED = {"lengths": "n_keys", "qkv": "weight", "output": "weight", "like": "dtype"}
WRONG = {
    "no tensor": lambda x: [1],
    "whole numbers": lambda x: x.long() if x.is_floating_point() else x.double(),
    "complex": lambda x: x.to(torch.complex64),
    "elsewhere": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("wrong", WRONG)
@EVERY
def test_a_wrong_tensor_is_one_sentence(operator, found, case, wrong):
    values = operator.draw(case, Random(case, DEVICE))
    inputs = {name: values.get(name) for name in operator.tensors}
    options = operator.call_options(case.problem)
    for implementation in (operator.implementations[0].name, found.name):
        for name, x in inputs.items():
            if x is None or wrong == "elsewhere" and (len(inputs) == 1 or name == "like"):
                continue
            tensors = tuple((inputs | {name: WRONG[wrong](x)}).values())
            with pytest.raises((ValueError, RuntimeError)) as refused:
                call(operator, implementation, tensors, operator.numbers, options)
            said = str(refused.value)
            assert "\n" not in said and " must " in said, said
            assert any(one in said for one in (name, RENAMED.get(name, name), "it takes")), said


@EVERY
def test_missing_names_dtypes_and_gradients_are_refused(operator, found, case):
    values = operator.draw(case, Random(case, DEVICE))
    inputs, options = (
        [values.get(name) for name in operator.tensors],
        operator.call_options(case.problem),
    )
    with pytest.raises(ValueError, match=f"unknown implementation 'quick' of {operator.name}"):
        call(operator, "quick", tuple(inputs), operator.numbers, options)
    doubles = [x.double() if x is not None and x.is_floating_point() else x for x in inputs]
    # Scales of a cache in 8 bits are float32 in any case.
    with pytest.raises((RuntimeError, ValueError), match="not float64|k_descale is torch.float64"):
        call(operator, found.name, tuple(doubles), operator.numbers, options)
    if not operator.differentiated:
        asking = inputs[0].clone().requires_grad_(), *inputs[1:]
        with pytest.raises(ValueError, match=f"asks for a gradient and {operator.name} gives none"):
            call(operator, found.name, asking, operator.numbers, options)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


X = zeros(1, 2, 8, 64)
TWO, THREE, FOUR = (X[:, [0, 1, 1, 0][:n]] for n in (2, 3, 4))
TARGET, HALF, NAN = torch.zeros(5, dtype=torch.int64), int32(0, 4, 8), float("nan")
PACKED = {"cu_seqlens_q": HALF, "cu_seqlens_k": HALF}
Q, KEYS, PAGES = zeros(2, 4, 1, 16), zeros(9, 2, 32, 16), torch.arange(6).int().view(2, 3)
TURNS = {"q": zeros(2, 4, 5, 16), "k": zeros(2, 2, 5, 16), "cos": zeros(5, 8), "sin": zeros(5, 8)}
BLOCK = dict(
    zip(
        WEIGHTS,
        map(torch.ones, ((16,), (48, 16), (16, 16), (16,), (24, 16), (16, 24))),
        strict=True,
    )
)


H = torch.ones(2, 5, 16)


def block(h=H, update=None, n_keys=None, **weights):
    given = tuple((BLOCK | weights).values())
    return transformer_block(h, update, given, 2, n_k=3, n_keys=n_keys)


# Functions with arguments that go together, and each change that does not, with its sentence.
WRONGS = {
    softmax: ({"x": zeros(2, 3)}, [({"x": torch.tensor(1.0)}, "x has no dimensions")]),
    layer_norm: (
        {"x": zeros(2, 8), "weight": zeros(8), "bias": zeros(8)},
        [
            ({"x": zeros(2, 7)}, "x is (2, 7), weight (8,) and bias (8,)"),
            ({"bias": zeros(7)}, "bias (7,): they must be [..., D]"),
            ({"eps": -1.0}, "eps is -1.0: it must be positive and finite"),
            ({"eps": torch.tensor(1.0)}, "eps is a tensor: it must be a Python number"),
            (
                dict.fromkeys(("x", "weight", "bias"), zeros(16_385)),
                "it takes widths up to 16384, not 16385",
            ),
        ],
    ),
    rms_norm: (
        {"x": zeros(2, 8), "weight": zeros(8)},
        [
            ({"x": zeros(2, 7)}, "x is (2, 7) and weight (8,): they must be"),
            ({"weight": zeros(8, 1)}, "and weight (8, 1): they must be"),
            ({"x": zeros(2, 0), "weight": zeros(0)}, "with D at least 1"),
            ({"x": torch.tensor(1.0)}, "x is () and weight"),
            ({"eps": 0.0}, "eps is 0.0: it must be positive and finite"),
            ({"eps": NAN}, "eps is nan: it must be positive and finite"),
            ({"eps": torch.tensor(0.5)}, "eps is a tensor: it must be a Python number"),
            ({"x": zeros(2, 16_385), "weight": zeros(16_385)}, "widths up to 16384, not 16385"),
        ],
    ),
    add_rms_norm: (
        {"x": zeros(2, 8), "update": zeros(2, 8), "weight": zeros(8)},
        [
            ({"update": zeros(2, 7, 8)}, "update is torch.float32"),
            ({"update": zeros(2, 8).half()}, "update is torch.float16"),
        ],
    ),
    rope.rope: (
        TURNS,
        [
            ({"q": zeros(2, 4, 5, 5), "k": zeros(2, 2, 5, 5)}, "head_dim is 5: it must be even"),
            ({"q": TURNS["q"][0]}, "q is (4, 5, 16): it must be [batch, heads, tokens, D]"),
            ({"k": zeros(2, 2, 3, 16)}, "they may differ only in their heads"),
            ({"k": zeros(2, 2, 5, 16).half()}, "k torch.float16 on cpu: they must be equal"),
            ({"cos": zeros(5, 4), "sin": zeros(5, 4)}, "both must be [n_positions, 8], half of"),
            (
                {name: TURNS[name].half() for name in ("cos", "sin")},
                "both must be float32 or both q's torch.float32",
            ),
            ({"cos": zeros(3, 8), "sin": zeros(3, 8)}, "3 positions and q 5 tokens: without"),
            ({"positions": zeros(2, 4).int()}, "they must be [2, 5] on cpu"),
            ({"positions": zeros(2, 5)}, "positions are torch.float32: they must be int32"),
            ({"positions": int32(-1, 0, 0, 0, 1).expand(2, 5)}, "positions lie between -1 and 1"),
            ({"positions": int32(0, 0, 0, 0, 5).expand(2, 5)}, "they must lie between 0 and 4"),
            ({"pairing": "other"}, "pairing is 'other': choose from half, interleaved"),
        ],
    ),
    rope.qk_norm_rope: (
        TURNS | {"q_weight": zeros(16), "k_weight": zeros(16)},
        [
            ({"q_weight": zeros(8)}, "q_weight is (8,): it must be [16], head_dim"),
            ({"eps": 0.0}, "eps is 0.0: it must be positive and finite"),
            ({"pairing": "other"}, "choose from half, interleaved"),
            ({"q": zeros(2, 4, 5, 8)}, "they may differ only in their heads"),
            ({"positions": int32(0, 0, 0, 0, 5).expand(2, 5)}, "they must lie between 0 and 4"),
        ],
    ),
    embed_rows: (
        {
            "x_context": zeros(2, 3, 1), "y_context": zeros(2, 3, 1), "x_target": zeros(2, 4, 1),
            "weight": zeros(8, 3), "dtype": torch.float32,
        },
        [
            ({"y_context": None}, "one of x_context and y_context is None: they must be given"),
            (dict.fromkeys(("x_context", "y_context", "x_target")), "one of them must be given"),
            ({"weight": zeros(8)}, "weight has shape (8,): it must be"),
            ({"x_target": zeros(2, 4)}, "x_target has shape (2, 4): it must be [B, N, d_x]"),
            ({"y_context": zeros(2, 4, 1)}, "they must agree in batch and points"),
            ({"y_context": zeros(2, 3, 2)}, "tokens have 4 features"),
            ({"x_target": zeros(1, 4, 1)}, "they must agree in batch and d_x"),
            (
                {"x_context": None, "y_context": None, "x_target": zeros(2, 4, 3)},
                "x_target (2, 4, 3): weight must be",
            ),
            ({"weight": zeros(8, 3).half()}, "weight is torch.float16: it must be"),
            ({"weight": zeros(8, 3).double()}, "not float64"),
            (
                {"y_context": zeros(2, 3, 7), "weight": zeros(8, 9)},
                "d_x + d_y + 1 is 9, and it takes tokens of at most 8 features: choose torch",
            ),
            (
                {"x_target": zeros(2, 4, 1).requires_grad_()},
                "'fused' cannot run here: it gives no gradient of x_target",
            ),
        ],
    ),
    mixture_nll: (
        {"parameters": zeros(5, 2, 3), "y": zeros(5, 1)},
        [
            ({"y": zeros(4, 1)}, "parameters are (5, 2, 3) and y (4, 1): they must be"),
            ({"y": zeros(5, 2)}, "and y (5, 2): they must be"),
            ({"parameters": zeros(0, 2, 3), "y": zeros(0, 1)}, "mean needs at least one target"),
            ({"sigma_min": -1.0}, "sigma_min is -1.0: it must be finite and not negative"),
            ({"sigma_min": torch.tensor(0.5)}, "sigma_min is a tensor: it must be a Python number"),
            ({"parameters": zeros(3), "y": zeros()}, "are (3,) and y (): they must"),
            ({"n_targets": int32(1)}, "n_targets is torch.int32 (1,) and y (5, 1): they must be"),
            ({"y": zeros(5, 1).double()}, "not float64"),
            ({"parameters": zeros(5, 65, 3)}, "K is 65, and it takes at most 64 components"),
            (
                {"parameters": zeros(5, 2, 11), "y": zeros(5, 5)},
                "d_y is 5, and it takes y of at most 4 dimensions",
            ),
            (
                {"parameters": zeros(2, 8, 3, 3), "y": zeros(2, 8, 1), "n_targets": int32(-1, 8)},
                "n_targets is -1 in sample 0: it must lie between 0 and 8",
            ),
        ],
    ),
    mixture_heads: (
        {"x": zeros(4, 32), "up": zeros(2, 48, 32), "down": zeros(2, 3, 48)},
        [
            ({"down": zeros(1, 3, 48)}, "they must be [K, F, D] and [K, O, F]"),
            ({"up": zeros(48, 32)}, "they must be [K, F, D] and [K, O, F]"),
            ({"x": zeros(4, 16)}, "with D = 32 of up"),
            ({"down": zeros(2, 17, 48)}, "is 17, and it takes at most 16 outputs a head"),
            (
                {"x": zeros(4, 32).bfloat16(), "up": zeros(2, 42, 32), "down": zeros(2, 3, 42)}
                | {"implementation": "grouped_mm"},
                "F is 42 and D 32: it takes multiples of 8",
            ),
        ],
    ),
    mlp: (
        {"x": zeros(4, 32), "up": zeros(48, 32), "down": zeros(32, 48)},
        [
            ({"down": zeros(48, 32)}, "they must be [F, D] and [D, F]"),
            ({"x": zeros(4, 16)}, "with D = 32 of up"),
            (
                {"x": zeros(4, 48), "up": zeros(8, 48), "down": zeros(48, 8)}
                | {"implementation": "single"},
                "'single' cannot run here: D is 48: it takes a power",
            ),
        ],
    ),
    linear: (
        {"x": zeros(2, 7, 8), "weight": zeros(24, 8)},
        [
            ({"x": zeros(2, 7, 9)}, "x is (2, 7, 9) and weight (24, 8): they must be"),
            ({"weight": zeros(24)}, "and weight (24,): they must be [..., n_in] and"),
        ],
    ),
    project_qkv: (
        {"x": zeros(2, 7, 8), "weight": zeros(24, 8), "n_heads": 2},
        [
            ({"x": zeros(2, 7, 9)}, "x is (2, 7, 9) and weight (24, 8): they must be"),
            ({"n_k": 0}, "n_k is 0 and first 0: they must lie in [1, 7] and [0, 6]"),
            ({"n_k": 8}, "n_k is 8 and first 0: they must lie in [1, 7]"),
            ({"first": 7}, "n_k is 7 and first 7: they must lie in"),
            ({"first": -1}, "n_k is 7 and first -1: they must lie in"),
            ({"n_keys": int32(1, 1)}, "give it with centred"),
            (
                {"n_keys": int32(1, 1).long(), "centred": True},
                "n_keys is torch.int64 (2,): it must be int32",
            ),
            (
                {"n_keys": int32(1, 9), "centred": True},
                "n_keys is 9 in sample 1: it must lie between 1 and 7",
            ),
        ],
    ),
    products.matmul: (
        {"a": zeros(2, 3), "b": zeros(3, 2)},
        [
            ({"b": zeros(2, 3)}, "3 columns and b 2 rows"),
            ({"b": zeros(3)}, "[M, K]"),
            ({"b": zeros(3, 2).half()}, "must be equal"),
        ],
    ),
    products.gelu_linear: (
        {"x": zeros(2, 3), "weight": zeros(4, 3), "bias": zeros(4)},
        [
            ({"weight": zeros(4, 2)}, "n_in"),
            ({"bias": zeros(3)}, "(4,)"),
            ({"weight": zeros(4, 3).half()}, "weight is torch.float16"),
        ],
    ),
    cross_entropy: (
        {"logits": zeros(5, 48), "target": TARGET},
        [
            ({"logits": zeros(5)}, "logits have shape (5,): they must be [N, V]"),
            ({"target": TARGET.int()}, "target is torch.int32: it must be torch.int64"),
            ({"target": TARGET[:4]}, "and target (4,): target must be [5]"),
            (
                {"target": torch.tensor([0, 48, 0, 0, 0])},
                "target is 48 in row 1: it must lie between 0 and 47, or be -100, which does not",
            ),
        ],
    ),
    linear_cross_entropy: (
        {"x": zeros(5, 3), "weight": zeros(7, 3), "target": TARGET},
        [
            ({"x": zeros(5, 4)}, "x is (5, 4) and weight (7, 3): they must be [N, D]"),
            ({"x": zeros(5, 3).half()}, "x is torch.float16 on cpu and weight torch.float32"),
            ({"weight": zeros(3)}, "weight (3,): they must be"),
            ({"target": TARGET[:4]}, "x is (5, 3) and target (4,): target must be [5]"),
            ({"target": TARGET - 1}, "target is -1 in row 0: it must lie between 0 and 6, or be"),
        ],
    ),
    rms_norm_linear: (
        {"x": zeros(4, 32), "update": zeros(4, 32)}
        | {"norm_weight": zeros(32), "weight": zeros(8, 32)},
        [
            ({"weight": zeros(8, 31)}, "weight (8, 31): they must be [..., D] and [n_out, D]"),
            ({"weight": zeros(32)}, "weight (32,): they must be"),
            ({"update": zeros(3, 32)}, "update is"),
            ({"norm_weight": zeros(31)}, "norm_weight (31,): they must be [..., D] and [D]"),
            ({"weight": zeros(8, 32).requires_grad_()}, "weight asks for a gradient and rms_norm"),
        ],
    ),
    quantized_linear: (
        {"x": zeros(2, 96).half(), "weight": zeros(8, 12).int(), "scales": zeros(8, 3).half()},
        [
            ({"weight": zeros(8, 12).long()}, "weight is torch.int64: it must be torch.int8, or"),
            ({"weight": zeros(8, 11).int()}, "(8, 11): they must be [..., n_in] and [n_out, n_in"),
            ({"weight": zeros(8, 12).char()}, "torch.int8 (8, 12): they must be [..., n_in] and"),
            ({"scales": zeros(8, 3)}, "scales is torch.float32 and x torch.float16: they must be"),
            ({"scales": zeros(8, 5).half()}, "(8, 5): it must be [8, n_groups], with n_groups a"),
            ({"scales": zeros(3, 8).half()}, "scales has shape (3, 8): it must be [8, n_groups]"),
            ({"scales": zeros(8, 2).half()}, "2 groups of 48 weights: groups must have 32, 64"),
            ({"zeros": zeros(8, 3)}, "zeros is torch.float32 (8, 3): it must be torch.uint8 of"),
            ({"zeros": zeros(8, 1).byte()}, "zeros is torch.uint8 (8, 1): it must be"),
            ({"bias": zeros(9)}, "bias is torch.float32 (9,): it must be torch.float32 or x's"),
            ({"bias": zeros(8).bfloat16()}, "bias is torch.bfloat16 (8,): it must be"),
            ({"x": zeros(96).bfloat16()}, "scales is torch.float16 and x torch.bfloat16: they"),
            ({"x": torch.tensor(1.0)}, "x is () and weight"),
            ({"scales": zeros(8, 3).half().requires_grad_()}, "scales asks for a gradient and"),
        ],
    ),
    rms_norm_swiglu: (
        {"x": zeros(3, 24), "gate": zeros(3, 24), "weight": zeros(24)},
        [
            ({"gate": zeros(2, 24)}, "gate torch.float32 (2, 24)"),
            ({"weight": zeros(12)}, "weight (12,): they must be [..., width] and"),
            *(({"eps": eps}, "it must be positive and finite") for eps in (0.0, -1.0, NAN)),
            (
                {"x": zeros(1, 16_385), "gate": zeros(1, 16_385), "weight": zeros(16_385)},
                "rows of at most 16384, not 16385",
            ),
        ],
    ),
    attention: (
        {"q": X, "k": X, "v": X},
        [
            ({"q": X[0]}, "q has shape"),
            ({"q": X[0, 0, 0, 0]}, "q has shape"),
            ({"q": X.bfloat16()}, "k is torch.float32 and q is torch.bfloat16"),
            ({"k": X[:, :, :0], "v": X[:, :, :0]}, "n_k is 0"),
            ({"v": X[:, :, :4]}, "they must be equal"),
            ({"k": X[..., :32], "v": X[..., :32]}, "agree in batch and head_dim"),
            ({"k": X.mT.contiguous().mT}, "last dimension must be contiguous"),
            ({"k": THREE, "v": THREE}, "k has 3 heads and q 2"),
            ({"k": FOUR, "v": FOUR}, "k has 4 heads and q 2"),
            ({"q": THREE}, "k has 2 heads and q 3: k's heads must divide q's"),
            ({"k": X[:, :0], "v": X[:, :0]}, "k has 0 heads and q 2"),
            ({"q": X[:, :0]}, "q has 0 heads: attention needs at least one"),
            ({"n_keys": int32(1).long()}, "n_keys is torch.int64"),
            ({"n_keys": int32(1, 1)}, "must be int32 of shape"),
            ({"n_keys": int32(1).to("meta")}, "n_keys is on meta"),
            ({"n_keys": [8]}, "it must be a tensor"),
            *(
                ({"n_keys": int32(n)}, f"n_keys is {n} in sample 0: it must lie between 1 and 8")
                for n in (0, -3, 9)
            ),
            ({"window": 0}, "window is 0: it must be a whole number, at least 1"),
            ({"window": -1}, "window is -1: it must be a whole number, at least 1"),
            ({"window": 1.5}, "window is 1.5"),
            ({"cu_seqlens_q": HALF}, "cu_seqlens_k is None: packed sequences need"),
            ({"cu_seqlens_k": HALF}, "cu_seqlens_q is None: packed sequences need"),
            (PACKED | {"cu_seqlens_k": HALF.long()}, "cu_seqlens_k is torch.int64"),
            (PACKED | {"cu_seqlens_q": HALF[None]}, "cu_seqlens_q is torch.int32 (1, 3)"),
            (PACKED | {"cu_seqlens_q": HALF[:1]}, "cu_seqlens_q is torch.int32 (1,)"),
            (PACKED | {"cu_seqlens_k": HALF.to("meta")}, "cu_seqlens_k is on meta"),
            (
                PACKED | {"cu_seqlens_k": int32(0, 4, 6, 8)},
                "cu_seqlens_q has 3 numbers and cu_seqlens_k 4",
            ),
            *(
                (PACKED | {f"cu_seqlens_{side}": int32(0, 4, 8) + int32(*off)}, f"_{side} {said}")
                for side in "qk"
                for off, said in (
                    ((0, 5, 0), "goes from 9 to 8 at place 2: it must not decrease"),
                    ((0, -5, 0), "goes from 0 to -1 at place 1: it must not decrease"),
                    ((1, 0, 0), "begins with 1: it must begin with 0"),
                    ((0, 0, 1), f"ends with 9 and {side} has 8 rows: they must be equal"),
                )
            ),
            (PACKED | {"n_keys": int32(1)}, "n_keys and cu_seqlens are both given"),
            (
                PACKED | dict.fromkeys("qkv", zeros(2, 2, 8, 64)),
                "q has a batch of 2: packed sequences lie in a batch of 1",
            ),
            ({"causal": 1}, "causal is 1: it must be True or False"),
            ({"base2": None}, "base2 is None: it must be True or False"),
            ({"lse": "yes"}, "lse is 'yes': it must be True or False"),
            ({"compute_dtype": torch.int32}, "compute_dtype is torch.int32: it must be torch.bf"),
            ({"compute_dtype": "bfloat16"}, "compute_dtype is 'bfloat16': it must be torch.bf"),
            (
                dict.fromkeys("qkv", X.long()) | {"compute_dtype": torch.bfloat16},
                "q is torch.int64: it must be a float dtype",
            ),
            (
                {"k": X.half(), "v": X.half(), "compute_dtype": torch.bfloat16},
                "q is torch.float32 on cpu and k torch.float16 on",
            ),
            ({"scale": 0.5, "base2": True}, "scale is 0.5 and base2 is set"),
            *(({"scale": x}, f"scale is {x}") for x in (-1.0, 0.0, NAN, float("inf"), -1)),
            ({"scale": torch.tensor(0.5)}, "scale is a tensor: it must be a Python number"),
            (dict.fromkeys("qkv", X[..., :40]), "cannot run here: it takes head_dim 16, 32, 48,"),
        ],
    ),
    buffered_attention: (
        {"q": zeros(2, 1, 20, 16), "n_buffer": 3} | dict.fromkeys("kv", zeros(2, 1, 8, 16)),
        [
            ({"q": zeros(1, 20, 16)}, "q has shape (1, 20, 16): it must be [B, H, n_q, D]"),
            ({"v": zeros(2, 1, 8, 16).double()}, "v is torch.float64 and q is torch.float32"),
            ({"v": zeros(2, 1, 7, 16)}, "v (2, 1, 7, 16): they must be equal"),
            (dict.fromkeys("kv", zeros(1, 1, 8, 16)), "they must agree except in their rows"),
            ({"n_buffer": 0}, "n_buffer is 0: it must be a whole number, at least 1"),
            ({"n_buffer": 8}, "n_buffer is 8 of 8 keys: at least one key must belong to the"),
            ({"n_buffer": 3.0}, "n_buffer is 3.0: it must be a whole number"),
            ({"n_groups": -1}, "n_groups is -1: it must be a whole number, at least 0"),
            ({"n_groups": True}, "n_groups is True: it must be a whole number"),
            (
                {"n_groups": 5},
                "q has 20 rows: it must have at least 23, for the context, the buffer and 5 groups",
            ),
            ({"n_keys": int32(1, 6)}, "n_keys is 6 in sample 1: it must lie between 1 and 5"),
            ({"base2": "no"}, "base2 is 'no': it must be True or False"),
            ({"all_rows": 1}, "all_rows is 1: it must be True or False"),
            ({"scale": 0.0}, "scale is 0.0: it must be positive"),
            ({"scale": 1.0, "base2": True}, "base2 is set"),
            (
                {"q": zeros(1, 1, 195, 32), "n_buffer": 65}
                | dict.fromkeys("kv", zeros(1, 1, 194, 32)),
                "keeps 4 blocks of 64 keys on chip, and 129 points of the context with 65 of the",
            ),
            (
                {"q": zeros(1, 1, 9, 48).bfloat16()}
                | dict.fromkeys("kv", zeros(1, 1, 8, 48).bfloat16()),
                "it takes head_dim 16, 32, 64 in bfloat16, not 48",
            ),
        ],
    ),
    decode_attention: (
        {"q": Q, "k": KEYS, "v": KEYS, "n_keys": int32(5, 9), "page_table": PAGES},
        [
            ({"q": Q[0]}, "q has shape (4, 1, 16): it must be [B, H, T, D]"),
            ({"k": KEYS[0]}, "k has shape (2, 32, 16): it must be [B, H_kv, S, D], or"),
            ({"k": KEYS.mT.contiguous().mT}, "its last dimension must be contiguous"),
            ({"v": KEYS[:3]}, "they must be equal"),
            (dict.fromkeys("kv", KEYS.half()), "k is torch.float16 and q is torch.float32"),
            (dict.fromkeys("kv", KEYS.to(torch.float8_e4m3fn)), "a q of 16 bits"),
            ({"q": Q[..., :8]}, "they must agree in D"),
            ({"q": Q[:, :3]}, "q's heads must be a multiple of k's"),
            ({"n_keys": int32(5)}, "it must be int32 of shape (2,)"),
            ({"page_table": None}, "q has 2 sequences and k 9: without page_table"),
            ({"page_table": PAGES[:1]}, "it must be int32 [2, max_pages]"),
            (dict.fromkeys("kv", KEYS[:0]), "k has no pages: it must have at least one"),
            ({"k_descale": torch.ones(3)}, "k_descale is torch.float32 (3,): it must be float32"),
            ({"v_descale": torch.ones(2).half()}, "must be float32 [2] or [2, 2]"),
            ({"full": 1}, "full is 1: it must be True or False"),
            ({"scale": 0.0}, "scale is 0.0: it must be positive and finite"),
            ({"n_keys": int32(5, 97)}, "n_keys is 97 in sample 1: it must lie between 0 and 96"),
            ({"n_keys": int32(-1, 5)}, "n_keys is -1 in sample 0: it must lie between 0 and 96"),
            (
                {"page_table": PAGES + 9},
                "page_table is 9 in sample 0 at place 0: it must lie between 0 and 8",
            ),
            (
                {"q": Q[..., :8].repeat(1, 1, 1, 3)} | dict.fromkeys("kv", zeros(9, 2, 32, 24)),
                "it takes head_dim 16, 32,",
            ),
            (
                dict.fromkeys("kv", zeros(9, 2, 24, 16)),
                "it takes pages of a multiple of 16 tokens, not 24",
            ),
            (
                {"q": zeros(1025, 1, 1, 16), "n_keys": int32(1).expand(1025), "page_table": None}
                | dict.fromkeys("kv", zeros(1025, 1, 1, 16)),
                "it takes up to 1024 sequences, not 1025",
            ),
            ({"q": zeros(2, 128, 5, 16)}, "takes up to 256 queries that read the same keys"),
        ],
    ),
    block: (
        {},
        [
            ({"h": torch.ones(5, 16)}, "h is (5, 16): it must be [B, L, d_model]"),
            ({"output": BLOCK["output"][:8]}, "output is (8, 16): it must be (16, 16)"),
            ({"update": torch.ones(2, 4, 16)}, "they must be equal"),
            ({"n_keys": int32(3, 4)}, "n_keys is"),
            ({"norm_mlp": BLOCK["norm_mlp"][:8]}, "norm_mlp"),
        ],
    ),
}  # fmt: skip
OWN = dict.fromkeys(
    (softmax, layer_norm, rope.rope, rope.qk_norm_rope, products.matmul, cross_entropy,
     linear_cross_entropy, rms_norm_linear, quantized_linear, rms_norm_swiglu,
     buffered_attention, decode_attention),
    "triton",
)  # fmt: skip


@pytest.mark.parametrize("function", WRONGS, ids=lambda function: function.__name__)
def test_wrong_arguments_are_one_sentence(function):
    right, wrong = WRONGS[function]
    asked = {} if function is block else {"implementation": OWN.get(function, "fused")}
    function(**right | asked)
    for change, sentence in wrong:
        with pytest.raises((ValueError, RuntimeError)) as refused:
            function(**right | asked | change)
        assert sentence in str(refused.value) and "\n" not in str(refused.value), sentence
