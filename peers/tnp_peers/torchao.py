"""Runs linear layers of package torchao, with products in 8 bits (e4m3) in training.

Its recipe is `rowwise_with_gw_hp`. The products that give y and dx are in e4m3. Their left operand
has a scale for each row. The weight has one for each row forward, and a single one backward.
Gradients of weights are products in 16 bits.
"""

from functools import cache

import torch
from torch import Tensor

from tnp.dispatch.spec import Call, Case, Implementation, Reason, Work, on_cuda
from tnp.ops import mlp as declared
from tnp.ops.mlp import eight_bit
from tnp_peers.support import both

RECIPE = "rowwise_with_gw_hp"
MULTIPLE = 16  # PyTorch's products in 8 bits need multiples of this for D and F


@cache
def _layer() -> torch.nn.Module:
    """Returns torchao's form of a linear layer without bias. Only its configuration is used."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = Float8LinearConfig.from_recipe_name(RECIPE)
    with torch.device("meta"):
        return Float8Linear.from_float(torch.nn.Linear(1, 1, bias=False), config=config)


@torch.compiler.assume_constant_result
def _configuration() -> tuple:
    return _layer().linear_mm_config, _layer().config


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """Computes Float8Linear's forward pass, with the weight cast to x's dtype first."""
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    return matmul_with_hp_or_float8_args.apply(x, weight.to(x.dtype).t(), *_configuration())


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Returns silu(x upᵀ) downᵀ."""
    return _linear(torch.nn.functional.silu(_linear(x, up)), down)


def _multiples(call: Call) -> Reason:
    for name in ("d_model", "d_ff"):
        if call.problem[name] % MULTIPLE:
            return f"it takes multiples of {MULTIPLE} for {name}, not {call.problem[name]}"
    return None


def _work(case: Case, pass_: str) -> Work:
    return eight_bit.work(declared.work(case, pass_), pass_)


MLP = Implementation(
    "torchao",
    run=mlp,
    supported=both(on_cuda(89), _multiples),
    dtypes=("bfloat16",),
    precision="e4m3",
    selectable=False,  # "auto:e4m3" is ours
    compile="default",  # its documentation recommends it: this fuses the casts
    work=_work,
)
