"""Projections without bias, and those of attention: queries, keys and values of the rows that need
them.

    y = x wᵀ        q = x[:, first:] w_qᵀ    k = x[:, :n_keys] w_kᵀ    v = x[:, :n_keys] w_vᵀ

`torch` multiplies through PyTorch's own linear layer, all three projections as one matmul where all
rows need all of them. `fused` projects only what is asked for, hands q, k and v over in the layout
attention reads, takes their gradients in the layout attention writes, and accumulates the gradients
of weights in float32 and never rounds them. The matmuls are cuBLAS's in both.
"""

import math

import torch
import torch.nn.functional as F

from tnp.inputs import require_floats
from tnp.ops import auto, registry
from tnp.ops.casting import cast_weight
from tnp.ops.weight_gradient import weight_gradient

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# A fact of the machine: torch.compile asks once instead of tracing into drivers.
_require_supported = torch.compiler.assume_constant_result(registry.check)


@torch.library.custom_op("tnp::linear", mutates_args=())
def _linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ cast_weight(weight, x.dtype).t()


@_linear.register_fake
def _(x, weight):
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("tnp::linear_backward", mutates_args=())
def _linear_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dx = dy @ cast_weight(weight, dy.dtype)
    return dx, weight_gradient(dy, x).to(weight.dtype)


@_linear_backward.register_fake
def _(dy, x, weight):
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


_linear.register_autograd(
    lambda ctx, dy: _linear_backward(dy, *ctx.saved_tensors), setup_context=_save
)


@torch.library.custom_op("tnp::project_qkv", mutates_args=())
def _project_qkv(
    x: torch.Tensor, weight: torch.Tensor, n_keys: int, first: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    w_q, w_k, w_v = cast_weight(weight, x.dtype).chunk(3)
    return _rows(x, w_q, first, x.shape[1]), _rows(x, w_k, 0, n_keys), _rows(x, w_v, 0, n_keys)


def _rows(x: torch.Tensor, weight: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """x[:, first:last] @ weightᵀ, without a copy of the rows."""
    if first == 0 and last == x.shape[1]:
        return (x.flatten(0, 1) @ weight.t()).view(*x.shape[:2], len(weight))
    return torch.bmm(x[:, first:last], weight.t().expand(len(x), -1, -1))


@_project_qkv.register_fake
def _(x, weight, n_keys, first):
    batch, n_rows, d_model = x.shape
    n_queries = n_rows - first
    return tuple(x.new_empty(batch, n, d_model) for n in (n_queries, n_keys, n_keys))


@torch.library.custom_op("tnp::project_qkv_backward", mutates_args=())
def _project_qkv_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    n_keys: int,
    first: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, n_rows, d_model = x.shape
    w_q, w_k, w_v = cast_weight(weight, x.dtype).chunk(3)
    dx = x.new_empty(x.shape)
    if first == 0:
        torch.mm(dq.flatten(0, 1), w_q, out=dx.view(-1, d_model))
    else:
        dx[:, :first] = 0.0
        torch.bmm(dq, w_q.expand(batch, -1, -1), out=dx[:, first:])
    for gradient, w in ((dk, w_k), (dv, w_v)):
        dx[:, :n_keys].baddbmm_(gradient, w.expand(batch, -1, -1))
    dweight = weight.new_empty(weight.shape, dtype=torch.float32)
    keys, rows = _contiguous(x[:, :n_keys]), _contiguous(x[:, first:])
    for out, gradient, of in zip(dweight.chunk(3), (dq, dk, dv), (rows, keys, keys), strict=True):
        weight_gradient(gradient.flatten(0, 1), of, out)
    return dx, dweight.to(weight.dtype)


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    """Rows of x [B, rows, D] as one matrix [B·rows, D].

    PyTorch copies strided rows an element a thread: elements of 16 bytes, where they can be such,
    take a third of the time (H200).
    """
    if not x.is_contiguous() and x.stride(2) == 1 and x.data_ptr() % 16 == 0:
        n = 16 // x.element_size()
        if all(size % n == 0 for size in (x.shape[2], x.storage_offset(), *x.stride()[:2])):
            x = x.view(torch.complex128).contiguous().view(x.dtype)
    return x.reshape(-1, x.shape[-1])


@_project_qkv_backward.register_fake
def _(dq, dk, dv, x, weight, n_keys, first):
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save_qkv(ctx, inputs, output) -> None:
    x, weight, ctx.n_keys, ctx.first = inputs
    ctx.save_for_backward(x, weight)


def _backward_qkv(ctx, dq, dk, dv):
    gradients = (x.contiguous() for x in (dq, dk, dv))
    return *_project_qkv_backward(*gradients, *ctx.saved_tensors, ctx.n_keys, ctx.first), None, None


_project_qkv.register_autograd(_backward_qkv, setup_context=_save_qkv)


def linear(x: torch.Tensor, weight: torch.Tensor, *, implementation: str = "torch") -> torch.Tensor:
    """x wᵀ.

    Args:
        x: [..., n_in]; bfloat16, float16 or float32 (`torch`: any float dtype).
        weight: [n_out, n_in], any float dtype, as a rule a float32 parameter; cast to x's.
        implementation: a name of `tnp.ops.registry.names("projection")`.

    Returns:
        [..., n_out] in x's dtype.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together.
        RuntimeError: the implementation cannot run on this device and dtype.
    """
    _check(x, weight, implementation)
    if implementation == "auto":
        implementation = _chosen(x, weight)
    if implementation == "torch":
        return F.linear(x, weight.to(x.dtype))
    rows = x.reshape(-1, x.shape[-1])
    return _linear(rows, weight).view(*x.shape[:-1], len(weight))


def project_qkv(
    x: torch.Tensor,
    weight: torch.Tensor,
    n_heads: int,
    *,
    n_keys: int | None = None,
    first: int = 0,
    implementation: str = "torch",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries of the rows from `first` on, keys and values of the first `n_keys` rows.

    Args:
        x: [B, L, d_model], of the dtypes that `linear` takes.
        weight: [3·d_model, d_model], those of q, k and v in turn; as a rule a float32 parameter.
        n_heads: how many equal shares d_model is read as.
        n_keys: from 1 to L; L where None.
        first: from 0 to L − 1.
        implementation: as for `linear`.

    Returns:
        q [B, n_heads, L − first, D], k and v [B, n_heads, n_keys, D], views of [B, rows, d_model].

    Raises:
        ValueError, RuntimeError: as `linear`.
    """
    _check(x, weight, implementation)
    d_model = x.shape[-1]
    if x.dim() != 3 or len(weight) != 3 * d_model or n_heads < 1 or d_model % n_heads:
        raise ValueError(
            f"x is {tuple(x.shape)}, weight {tuple(weight.shape)} and n_heads {n_heads}: they must "
            "be [B, L, d_model], [3·d_model, d_model] and a divisor of d_model"
        )
    if implementation == "auto":
        implementation = _chosen(x, weight)
    n_rows = x.shape[1]
    n_keys = n_rows if n_keys is None else n_keys
    if not 1 <= n_keys <= n_rows or not 0 <= first < n_rows:
        raise ValueError(
            f"n_keys is {n_keys} and first {first}: they must lie in [1, {n_rows}] and "
            f"[0, {n_rows - 1}]"
        )
    if implementation == "fused":
        q, k, v = _project_qkv(x, weight, n_keys, first)
    elif n_keys == n_rows and first == 0:
        q, k, v = F.linear(x, weight.to(x.dtype)).chunk(3, -1)
    else:
        w = weight.to(x.dtype)
        q = F.linear(x[:, first:], w[: len(w) // 3])
        k, v = F.linear(x[:, :n_keys], w[len(w) // 3 :]).chunk(2, -1)
    return tuple(y.unflatten(-1, (n_heads, -1)).transpose(1, 2) for y in (q, k, v))


def _chosen(x: torch.Tensor, weight: torch.Tensor) -> str:
    n_out, n_in = weight.shape
    rows = math.prod(x.shape[:-1])
    return auto.resolve("projection", x.device, x.dtype, rows=rows, n_in=n_in, n_out=n_out)


def _check(x: torch.Tensor, weight: torch.Tensor, implementation: str) -> None:
    if weight.dim() != 2 or x.shape[-1:] != weight.shape[1:]:
        raise ValueError(
            f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}: they must be [..., n_in] and "
            "[n_out, n_in]"
        )
    require_floats(x=x, weight=weight)
    if weight.device != x.device:
        raise ValueError(f"weight is on {weight.device} and x on {x.device}: they must be equal")
    _require_supported("projection", implementation, x.device, x.dtype)
    if implementation == "fused" and x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype}: it must be one of {', '.join(map(str, DTYPES))}")
