"""Tests which kernels serve a problem where no table says anything, and what is refused."""

import pytest

from tnp.dispatch import devices, selection
from tnp.dispatch.registry import catalog
from tnp.dispatch.spec import Call

SIZES = {
    "mlp": {"rows": 777, "d_model": 512, "d_ff": 1408},
    "mixture_heads": {"rows": 777, "d_model": 512, "d_ff": 1408}
    | {"n_components": 10, "n_outputs": 3},
    "linear": {"rows": 1, "n_in": 512, "n_out": 3},
    "attention": {"batch": 1, "n_heads": 1, "n_q": 4, "n_k": 4, "head_dim": 64},
    "gelu_linear": {"rows": 8, "n_in": 8, "n_out": 8},
}
TRITON, HOPPER, AGAIN = ("triton",) * 2, ("hopper",) * 2, ("hopper_again",) * 2
PORTABLE = "triton_8bit", "triton_8bit"


def asked(op: str, gpu="H100", dtype="bfloat16", wanted=None, **sizes) -> Call:
    operator = catalog().operator(op)
    target = devices.CPU if gpu == "CPU" else devices.named(gpu)
    wanted = operator.differentiated if wanted is None else wanted
    return Call(operator.problem(dtype, **SIZES[op] | sizes), target, wanted)


@pytest.mark.parametrize(
    "op, implementation, change, kernels",
    [
        ("mlp", "fused", {}, HOPPER),
        ("mlp", "fused", {"dtype": "float16", "d_ff": 1400}, HOPPER),  # 1400 is padded
        ("mlp", "fused", {"rows": 65_536}, HOPPER),
        ("mlp", "fused", {"rows": 65_537}, AGAIN),
        ("mlp", "fused", {"wanted": ()}, AGAIN),
        ("mlp", "fused", {"dtype": "float32"}, TRITON),
        ("mlp", "fused", {"d_model": 256}, TRITON),
        ("mlp", "fused", {"d_ff": 1365}, TRITON),
        ("mlp", "fused", {"d_ff": 1365, "wanted": ()}, ("triton_again",) * 2),
        ("mlp", "fused", {"gpu": "A100"}, TRITON),
        ("mlp", "fused", {"gpu": "B200"}, TRITON),
        ("mlp", "fused", {"gpu": "B200", "rows": 70_000}, ("triton_again",) * 2),
        ("mlp", "e4m3", {}, ("hopper_8bit", "hopper_8bit")),
        ("mlp", "e4m3", {"d_ff": 1365}, PORTABLE),
        ("mlp", "e4m3", {"gpu": "B200"}, PORTABLE),
        ("mixture_heads", "fused", {}, HOPPER),
        ("mixture_heads", "fused", {"gpu": "H200", "dtype": "float16", "d_ff": 1400}, HOPPER),
        ("mixture_heads", "fused", {"rows": 40_000}, HOPPER),
        ("mixture_heads", "fused", {"rows": 40_001}, AGAIN),
        ("mixture_heads", "fused", {"wanted": ()}, AGAIN),
        ("mixture_heads", "fused", {"d_model": 256}, TRITON),
        ("mixture_heads", "fused", {"d_ff": 1365}, TRITON),
        ("mixture_heads", "fused", {"n_outputs": 5}, TRITON),
        ("mixture_heads", "fused", {"dtype": "float32"}, TRITON),
        ("mixture_heads", "fused", {"gpu": "A100"}, TRITON),
        ("mixture_heads", "fused", {"gpu": "B200"}, TRITON),
        ("mixture_heads", "fused", {"rows": 16}, ("few_rows", "hopper_again")),
        (
            "mixture_heads",
            "fused",
            {"gpu": "A100", "rows": 1, "wanted": ()},
            ("few_rows", "triton"),
        ),
        ("linear", "fused", {}, ("few_rows", "cublas")),
        ("linear", "fused", {"rows": 16, "n_in": 2048, "dtype": "float16"}, ("few_rows", "cublas")),
        ("linear", "fused", {"rows": 17}, ("cublas", "cublas")),
        ("linear", "fused", {"rows": 2, "n_in": 2049}, ("cublas", "cublas")),
        ("linear", "fused", {"rows": 2, "dtype": "float32"}, ("cublas", "cublas")),
    ],
)
def test_kernels_of_both_passes(op, implementation, change, kernels):
    operator, call = catalog().operator(op), asked(op, **change)
    found = catalog().load(op, implementation)
    forward, _ = selection.choose_kernel(found.forward, operator, call)
    backward, _ = selection.choose_kernel(found.backward, operator, call, forward.saves)
    assert (forward.name, backward.name) == kernels and forward.saves == backward.saves


@pytest.mark.parametrize(
    "op, implementation, change, sentence",
    [
        ("attention", "e4m3", {}, None),
        ("attention", "e4m3", {"gpu": "RTX 4090"}, None),
        ("attention", "e4m3", {"gpu": "B200"}, None),
        ("attention", "e4m3", {"dtype": "float16"}, "it takes bfloat16, not float16"),
        ("attention", "e4m3", {"head_dim": 32}, "it takes head_dim 64, not 32"),
        (
            "attention", "e4m3", {"gpu": "A100"},
            "it needs compute capability 8.9 or newer, this GPU has 8.0",
        ),
        ("attention", "sdpa_efficient", {"dtype": "float32", "causal": True}, None),
        ("attention", "sdpa_efficient", {}, "it takes float32, not bfloat16"),
        ("attention", "sdpa_efficient", {"dtype": "float32", "gpu": "CPU"}, "a CUDA device"),
        ("attention", "sdpa_efficient", {"dtype": "float32", "causal": True, "n_q": 3}, "as many"),
        ("attention", "sdpa_efficient", {"dtype": "float32", "head_dim": 66}, "that 4 divides"),
        ("mlp", "e4m3", {}, None),
        ("mlp", "e4m3", {"gpu": "B200"}, None),
        ("mlp", "e4m3", {"rows": 70_000}, None),
        ("mlp", "e4m3", {"gpu": "A100"}, "8.9"),
        ("mlp", "e4m3", {"d_model": 40}, "D is 40: it takes multiples of 16"),
        ("mlp", "e4m3", {"dtype": "float16"}, "it takes bfloat16, not float16"),
        ("gelu_linear", "addmm_activation", {"gpu": "CPU", "wanted": ()}, "CUDA"),  # erf's form
        ("gelu_linear", "addmm_activation", {"wanted": ()}, None),
        ("gelu_linear", "addmm_activation", {}, "forward only"),
    ],
)  # fmt: skip
def test_limits(op, implementation, change, sentence):
    found = selection.refuses(catalog().load(op, implementation), asked(op, **change))
    assert found == sentence or sentence in found


def test_a_narrower_precision_is_the_users_choice():
    assert not catalog().load("mlp", "e4m3").chosen_from
    call = asked("attention", gpu="B200", wanted=(), n_heads=8, n_q=3000, n_k=3000)
    operator = catalog().operator("attention")
    chosen = [
        selection.choose_implementation(operator, name, call)[0].name
        for name in ("auto", "auto:e4m3")
    ]
    assert chosen[0] != "e4m3" and chosen[1] == "e4m3"
