"""Tests what other packages' products of codes are given and return, with stand-ins.

The stand-ins have the layouts, arguments and results of gemlite 0.6.0.post2, humming-kernels 0.1.19
and vllm 0.26.0. They compute in float32, so that every layout must be exact.
"""

import sys
import types
from enum import Enum

import pytest
import torch
from torch.nn import functional as F

from tnp.dispatch.devices import CPU, named
from tnp.dispatch.spec import Call
from tnp.ops._shared.random_values import Random
from tnp.ops.quantized_linear import OPERATOR, torch_forms
from tnp_peers import vllm_kernels
from tnp_peers.gemlite import GEMLITE
from tnp_peers.humming import HUMMING
from tnp_peers.vllm_kernels import MACHETE, MARLIN

N_OUT, N_IN = 128, 256


def problem(dtype="bfloat16", n_in=N_IN, n_out=N_OUT, group=64, bits=4, **options):
    sizes = {"rows": 6, "n_in": n_in, "n_out": n_out, "group": group}
    return OPERATOR.problem(dtype, **sizes, bits=bits, **options)


def inputs(group=64, bits=4, **options) -> list:
    """Returns x [2, 3, n_in] and a weight, all floats in float32."""
    case = OPERATOR.case("float32", 6, N_IN, N_OUT, group, bits=bits, **options)
    drawn = OPERATOR.draw(case, Random(case, torch.device("cpu"), 0))
    drawn["x"] = drawn["x"].view(2, 3, N_IN)
    return [drawn[name] for name in OPERATOR.tensors]


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the codes of int32 words [n, m], in order from the low bits on."""
    assert words.dtype == torch.int32
    codes = [(words >> at) & (2**bits - 1) for at in range(0, 32, bits)]
    return torch.stack(codes, -1).flatten(1)


def product(x, codes, zeros, scales, bias=None) -> torch.Tensor:
    """Returns x ŵᵀ + bias for codes [n_out, n_in], zeros and scales [n_out, n_groups]."""
    each = codes.shape[1] // scales.shape[1]
    zeros = zeros if isinstance(zeros, int) else zeros.repeat_interleave(each, 1)
    return F.linear(x, (codes.int() - zeros) * scales.repeat_interleave(each, 1), bias)


@pytest.fixture(autouse=True)
def gemlite(monkeypatch):
    class DType(Enum):
        FP16 = 1
        BF16 = 2

    class GemLiteLinear:
        def __init__(
            self, W_nbits, group_size, in_features, out_features, input_dtype, output_dtype
        ):
            assert input_dtype is output_dtype is DType.FP16  # bfloat16 alone has another
            self.bits, self.group, self.shape = W_nbits, group_size, (out_features, in_features)

        def pack(self, W_q, scales, zeros, bias):
            assert W_q.shape == self.shape
            self.mode = 2 if zeros is None else 3 if isinstance(zeros, int) else 4
            assert W_q.dtype == (torch.int8 if zeros is None else torch.uint8)
            self.W_q, self.scales, self.zeros, self.bias = W_q.t(), scales.t(), zeros, bias
            self.W_group_mode = self.channel_scale_mode = None

        def __call__(self, x):
            if self.group == self.shape[1]:
                assert (self.W_group_mode, self.channel_scale_mode) == (min(self.mode, 3), 0)
            zeros = 0 if self.zeros is None else self.zeros
            return product(x, self.W_q.t(), zeros, self.scales.t(), self.bias)

    module = types.ModuleType("gemlite")
    module.DType, module.GemLiteLinear = DType, GemLiteLinear
    monkeypatch.setitem(sys.modules, "gemlite", module)


@pytest.fixture(autouse=True)
def humming(monkeypatch):
    class HummingLayer(torch.nn.Module):
        def __init__(self, shape_n, shape_k, weight_config, has_bias, torch_dtype):
            super().__init__()
            self.bits = int(weight_config["dtype"].removeprefix("uint"))
            n_groups = shape_k // (weight_config["group_size"] or shape_k)
            shapes = {
                "weight": (shape_n, shape_k * self.bits // 32),
                "weight_scale": (shape_n, n_groups),
            }
            if weight_config["has_zero_point"]:
                shapes["zero_point"] = shape_n * self.bits // 32, n_groups
            if has_bias:
                shapes["bias"] = (shape_n,)
            for name, shape in shapes.items():
                whole = name in ("weight", "zero_point")
                x = torch.empty(shape, dtype=torch.int32 if whole else torch_dtype)
                setattr(self, name, torch.nn.Parameter(x, requires_grad=False))

        def load_from_tensors(self, tensors):
            assert tensors.keys() == dict(self.named_parameters()).keys()
            self.load_state_dict(tensors, strict=False)

        def transform(self):
            self.codes = unpacked(self.weight, self.bits)
            self.zeros = 2 ** (self.bits - 1)
            if hasattr(self, "zero_point"):
                self.zeros = unpacked(self.zero_point.t(), self.bits).t()

        def forward(self, inputs):
            assert inputs.dim() == 2 and inputs.is_contiguous()
            bias = getattr(self, "bias", None)
            return product(inputs, self.codes, self.zeros, self.weight_scale, bias)

    module = types.ModuleType("humming.layer")
    module.HummingLayer = HummingLayer
    monkeypatch.setitem(sys.modules, "humming", types.ModuleType("humming"))
    monkeypatch.setitem(sys.modules, "humming.layer", module)


# vLLM's numbers of uint4b8, uint8b128, uint4 and uint8, as its scalar_type.py gives them, with the
# bits and the code that stands for 0.
TYPES = {
    1125899907892224: (4, 8),
    1125899923621888: (8, 128),
    1125899906843648: (4, None),
    1125899906844672: (8, None),
}
# `get_scale_perms` of vLLM's marlin_utils.py: where each column of 64, or 32, comes from.
GROUPED = [i + 8 * j for i in range(8) for j in range(8)]
ROW = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
INTERLEAVED = [0, 2, 4, 6, 1, 3, 5, 7]


def ordered(x, of) -> torch.Tensor:
    """Returns columns where they were before vLLM's permutation, which `of` lists."""
    found = torch.empty_like(x).view(-1, len(of))
    found[:, of] = x.reshape(-1, len(of))
    return found.view_as(x)


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    def gptq_marlin_repack(b_q_weight, perm, size_k, size_n, num_bits, is_a_8bit):
        assert b_q_weight.shape == (size_k * num_bits // 32, size_n) and not is_a_8bit
        assert b_q_weight.is_contiguous() and perm.dtype == torch.int32 and not perm.numel()
        return b_q_weight

    def marlin_gemm(
        a, c, b_q_weight, b_bias, b_scales, a_scales, global_scale, b_zeros, g_idx, perm, workspace,
        b_type_id, size_m, size_n, size_k, is_k_full, use_atomic_add, use_fp32_reduce, is_zp_float,
    ):  # fmt: skip
        assert a.shape == (size_m, size_k) and a.is_contiguous() and b_scales.is_contiguous()
        assert c is a_scales is global_scale is None and not g_idx.numel() and not perm.numel()
        assert (is_k_full, use_atomic_add, use_fp32_reduce, is_zp_float) == (
            True,
            False,
            True,
            False,
        )
        assert not workspace.any()
        bits, zeros = TYPES[b_type_id]
        scales = ordered(b_scales, GROUPED if len(b_scales) > 1 else ROW).t()
        assert (zeros is None) == bool(b_zeros.numel())
        if zeros is None:
            assert b_zeros.shape == (len(b_scales), size_n * bits // 32)
            zeros = ordered(ordered(unpacked(b_zeros, bits), INTERLEAVED), GROUPED).t()
        bias = None if b_bias is None else ordered(b_bias[None], ROW)[0]
        return product(a, unpacked(b_q_weight.t(), bits), zeros, scales, bias)

    def machete_prepack_B(B, a_type, b_type, group_scales_type):
        assert B.t().is_contiguous() and b_type in TYPES and a_type == group_scales_type
        return B.t().contiguous().t()

    def machete_mm(
        A, B, b_type, out_type, group_scales, group_zeros, group_size, channel_scales,
        token_scales, schedule,
    ):  # fmt: skip
        assert out_type is channel_scales is token_scales is schedule is None
        assert A.dim() == 2 and A.is_contiguous() and group_scales.stride() == (N_OUT, 1)
        assert len(group_scales) == (1 if group_size == -1 else A.shape[1] // group_size)
        bits, zeros = TYPES[b_type]
        assert (zeros is None) == (group_zeros is not None)
        if zeros is None:
            zeros = (-group_zeros / group_scales).t()
        return product(A, unpacked(B.t(), bits), zeros, group_scales.t())

    found = types.SimpleNamespace(
        gptq_marlin_repack=gptq_marlin_repack, marlin_gemm=marlin_gemm,
        machete_prepack_B=machete_prepack_B, machete_mm=machete_mm,
    )  # fmt: skip
    monkeypatch.setattr(vllm_kernels, "_operators", lambda: found)


PEERS = pytest.mark.parametrize("peer", [GEMLITE, HUMMING, MARLIN, MACHETE], ids=lambda p: p.name)


@PEERS
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [64, N_IN])
@pytest.mark.parametrize("options", [{}, {"zeros": True}, {"bias": True}])
def test_layouts_stand_for_the_same_weights(peer, bits, group, options):
    if peer.limits(Call(problem(bits=bits, group=group, **options), named("NVIDIA H200"))):
        pytest.skip("it does not take these codes")
    of = inputs(bits=bits, group=group, **options)
    torch.testing.assert_close(peer.run(*of), OPERATOR.reference(*of), rtol=1e-4, atol=1e-5)


@PEERS
def test_a_layout_is_made_once_and_goes_with_its_weight(peer):
    of = inputs(bits=8)
    made, first = torch_forms._made(peer.plan), peer.run(*of)
    layout = made[of[1]][-1]
    assert torch.equal(peer.run(*of), first) and made[of[1]][-1] is layout
    of[2] *= 2.0
    assert torch.equal(peer.run(*of), 2.0 * first) and made[of[1]][-1] is not layout
    del layout
    before = len(made)
    of.clear()
    assert len(made) == before - 1


@pytest.mark.parametrize(
    ("peer", "asked", "reason"),
    [
        (GEMLITE, {"n_out": 777}, "it takes multiples of 128 for n_out, not 777"),
        (GEMLITE, {"n_in": 72, "group": 72}, "it takes multiples of 32 for n_in, not 72"),
        (HUMMING, {"n_in": 96, "group": 32}, "it takes multiples of 64 for n_in, not 96"),
        (HUMMING, {"dtype": "float32"}, "it takes bfloat16, float16, not float32"),
        (MARLIN, {"bits": 8, "zeros": True}, "it takes zeros with bits=4, not with 8"),
        (MARLIN, {"n_in": 64, "n_out": 64}, "multiples of 64 for n_in and n_out, one of them of"),
        (MACHETE, {"group": 32}, "it takes groups of 64, 128, or all 256, not 32"),
    ],
)
def test_limits_are_the_packages(peer, asked, reason):
    assert peer.limits(Call(problem(), named("NVIDIA H200"))) is None
    assert reason in peer.limits(Call(problem(**asked), named("NVIDIA H200")))


@PEERS
def test_they_need_a_gpu(peer):
    assert peer.refuses(Call(problem(), CPU)) == "it needs a CUDA device, not cpu"
    assert peer is not MACHETE or "older than 10.0" in peer.refuses(Call(problem(), named("B200")))


def test_vllms_library_is_found_without_its_package(tmp_path, monkeypatch):
    """Python finds a folder without `__init__.py` too."""
    on_gpu = Call(problem(), named("NVIDIA H200"))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / "vllm").mkdir()
    assert MARLIN.refuses(on_gpu).startswith("package vllm has no file _C_stable_libtorch*.so")
    file = tmp_path / "vllm" / "_C_stable_libtorch.abi3.so"
    file.touch()
    assert vllm_kernels._library() == file and MACHETE.refuses(on_gpu) is None
