"""Runs linear layers of package torchao, with products in 8 bits (e4m3) in training.

Its recipe is `tensorwise`: all three products are in 8 bits, and each operand has a single scale.
At small on an H200 a step takes 25.9 ms so, 28.7 with `rowwise_with_gw_hp`, and 39.2 with `rowwise`
(torch 2.11, compiled, in a CUDA graph; a script, no row).

Models that name it should be compiled, as its documentation recommends: that fuses the casts.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import silu

from tnp.dispatch.spec import Implementation, Operator, on_cuda
from tnp.ops import mixture_heads as of_heads
from tnp.ops import mlp as of_mlp
from tnp.ops import projection as of_rows
from tnp.ops._shared.declared import in_8_bits
from tnp_peers.support import both, multiples

RECIPE = "tensorwise"
MULTIPLE = 16  # PyTorch's products in 8 bits need multiples of this for the widths


@cache
def _layer() -> torch.nn.Module:
    """Returns torchao's form of a linear layer without bias. Only its configuration is used."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(RECIPE)
    with torch.device("meta"):
        plain = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False))
    return convert_to_float8_training(plain, config=config)[0]


@torch.compiler.assume_constant_result
def _configuration() -> tuple:
    return _layer().linear_mm_config, _layer().config


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Computes Float8Linear's forward pass, with the weight cast to x's dtype first."""
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    return matmul_with_hp_or_float8_args.apply(x, weight.to(x.dtype).t(), *_configuration())


def project_qkv(
    x: Tensor,
    weight: Tensor,
    n_keys: None,
    n_heads: int,
    n_q: int | None = None,
    n_k: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q of the last n_q rows, and k and v of the first n_k: [B, n_heads, rows, D] each."""
    n_rows, d_model = x.shape[1:]
    n_q, n_k = n_rows if n_q is None else n_q, n_rows if n_k is None else n_k
    if n_q == n_rows and n_k == n_rows:
        parts = linear(x, weight).chunk(3, -1)
    else:
        q = linear(x[:, n_rows - n_q :], weight[:d_model])
        parts = q, *linear(x[:, :n_k], weight[d_model:]).chunk(2, -1)
    return tuple(y.unflatten(-1, (n_heads, -1)).transpose(1, 2) for y in parts)


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Returns silu(x upᵀ) downᵀ."""
    return linear(silu(linear(x, up)), down)


def mixture_heads(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Returns silu(x up_kᵀ) down_kᵀ of every head. Its second layer, with 3 outputs, is in x's
    dtype.
    """
    hidden = silu(linear(x, up.flatten(0, 1))).unflatten(-1, up.shape[:2])
    return torch.einsum("...kf,kof->...ko", hidden, down.to(x.dtype))


def _of(operator: Operator, run: Callable, *widths: str) -> Implementation:
    return Implementation(
        "torchao",
        run=run,
        supported=both(on_cuda(89), multiples(MULTIPLE, *widths)),
        dtypes=("bfloat16",),
        precision="e4m3",
        selectable=False,  # "auto:e4m3" is ours
        compile="default",
        work=lambda case, pass_: in_8_bits(operator.work(case, pass_)),
    )


LINEAR = _of(of_rows.LINEAR, linear, "n_in", "n_out")
PROJECT_QKV = _of(of_rows.PROJECT_QKV, project_qkv, "d_model")
MLP = _of(of_mlp.OPERATOR, mlp, "d_model", "d_ff")
MIXTURE_HEADS = _of(of_heads.OPERATOR, mixture_heads, "d_model", "d_ff")
