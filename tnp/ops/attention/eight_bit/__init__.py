"""Defines attention in 8 bits (e4m3): its calls, and its rounding in PyTorch for the gate.

`quantize` says how q, k and v are held. The same is computed here once more in PyTorch. `held`
returns the rounded operands in float64. `rounded` returns the results in float64 with p rounded to
e4m3 too.

The backward pass is that of 16 bits. It reads the 16-bit q, k and v, and the o and lse that the
8-bit forward pass saved. So gradients pass straight through the rounding to 8 bits.

Functions import torch when they run, because planning reads this module without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from tnp.dispatch.spec import Call, Case, Reason, Work, triton_from
from tnp.ops._shared import e4m3
from tnp.ops.attention import definition
from tnp.ops.attention.torch_forms import LN_2, softmax_scale

if TYPE_CHECKING:
    from torch import Tensor


HEAD_DIM = 64
BLOCK = 128  # keys that share a scale and a reference, and at most so many make a mean
# The smallest exponent of a scale, which zeros have. The ratio of two scales then cannot overflow
# while values are below 2^90.
LEAST = -40
# log2 of the factor of p. The largest p is then between 128 and 256, and e4m3 holds up to 448.
RANGE = 8.0
# With scores' deviation above some 250, which this magnitude of q and k gives, gradients may
# overflow: a weight is e^(16-bit score − lse), and lse has the error of 8-bit scores, some 4 %.
MOST_MAGNITUDE = 16.0
TAKEN = (*definition.OPTIONS, "lse")
_triton = triton_from(89)


def supported(call: Call) -> Reason:
    """Returns why it cannot serve a call, or None. It needs tensor cores for e4m3, and D = 64."""
    if (reason := _triton(call)) is not None:
        return reason
    if call.problem["head_dim"] != HEAD_DIM:
        return f"it takes head_dim {HEAD_DIM}, not {call.problem['head_dim']}"
    return None


def work(case: Case, pass_: str) -> Work:
    """Returns the work of attention, with the products of the forward pass in e4m3."""
    least = definition.work(case, pass_)
    if pass_ == "backward":
        return least
    return Work({"e4m3": sum(least.flops.values())}, least.read, least.written)


def differentiates(case: Case) -> bool:
    """Returns whether the gradients of a case are finite."""
    return case["magnitude"] <= MOST_MAGNITUDE


# -------------------------------------------------------------------------------- the number format


class Head(NamedTuple):
    """Holds one head of a sample, rounded to 8 bits, in float64 [L, D], with centred keys and
    values, and the vectors [D] that these lack.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    of_keys: Tensor
    of_values: Tensor


def centred(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x [n, D] minus the mean of some rows, rounded in blocks, and that float32 mean."""
    import torch
    from torch.nn.functional import pad

    n = len(x)
    sampled = min(n, BLOCK)
    vector = x[torch.arange(sampled, device=x.device) * n // sampled].float().mean(0)
    blocks = pad(x.float() - vector, (0, 0, 0, -n % BLOCK)).unflatten(0, (-1, BLOCK))
    return e4m3.scaled(blocks, (1, 2), LEAST).flatten(0, 1)[:n], vector


def heads(inputs: Mapping[str, Tensor | None]) -> Iterator[tuple[tuple[int, int], int, Head]]:
    """Yields (sample, head), the sample's number of keys, and the head as 8 bits hold it."""
    q, k, v, n_keys = (inputs[name] for name in ("q", "k", "v", "n_keys"))
    for b in range(q.shape[0]):
        n = k.shape[2] if n_keys is None else int(n_keys[b])
        for h in range(q.shape[1]):
            k8, of_keys = centred(k[b, h, :n])
            v8, of_values = centred(v[b, h, :n])
            q8 = e4m3.scaled(q[b, h].float(), (1,), LEAST)
            yield (b, h), n, Head(q8, k8, v8, of_keys.double(), of_values.double())


def held(case: Case, inputs: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Returns q, k and v in float64 as 8 bits hold them, with the vectors that the kernel adds."""
    import torch

    found = {name: torch.zeros_like(inputs[name], dtype=torch.float64) for name in "qkv"}
    for at, n, head in heads(inputs):
        found["q"][at] = head.q
        found["k"][at][:n] = head.k + head.of_keys
        found["v"][at][:n] = head.v + head.of_values
    return found


def rounded(
    case: Case, inputs: Mapping[str, Tensor | None], upstream: Callable[[str, Tensor], Tensor]
) -> dict[str, Tensor]:
    """Returns the results in float64 from q, k, v and p as 8 bits hold them.

    p is relative to the reference of online softmax over blocks of 128 keys, rounded up to a whole
    number. The last block comes first. Gradients are those of the 16-bit q, k and v at o and lse of
    these results.
    """
    import torch
    from torch.nn.functional import pad

    scale = softmax_scale(definition.SCALE, case.problem["base2"])
    scale_log2 = scale / LN_2
    q, k, v = (inputs[name].detach() for name in "qkv")
    o = torch.zeros_like(q, dtype=torch.float64)
    lse = o.new_zeros(q.shape[:-1])  # to base 2
    for at, n, head in heads(inputs):
        s = pad(scale_log2 * head.q @ head.k.mT, (0, -n % BLOCK), value=float("-inf"))
        s = s.unflatten(1, (-1, BLOCK)).roll(1, 1)
        reference = s.amax(2).ceil().cummax(1).values
        p = torch.exp2(s - reference[:, :, None] + RANGE)
        weight = torch.exp2(reference - reference[:, -1:])[:, :, None]
        total = (p * weight).sum((1, 2))
        p = (e4m3.nearest(p) * weight).roll(-1, 1).flatten(1)[:, :n]
        o[at] = p @ head.v / total[:, None] + head.of_values
        lse[at] = reference[:, -1] - RANGE + total.log2()
        lse[at] += scale_log2 * (q[at].double() @ head.of_keys)
    found = {"o": o, "lse": lse * LN_2}
    if case["forward_only"]:
        return found

    do = upstream("o", o.to(q.dtype))
    dlse = upstream("lse", found["lse"].float()) if case.problem["lse"] else None
    found |= {f"d{name}": torch.zeros_like(inputs[name], dtype=torch.float64) for name in "qkv"}
    for at, n, _head in heads(inputs):
        q_, k_, v_ = q[at].double(), k[at][:n].double(), v[at][:n].double()
        do_ = torch.zeros_like(q_) if do is None else do[at].double()
        p = torch.exp2(scale_log2 * q_ @ k_.mT - lse[at][:, None])
        delta = (do_ * o[at].to(q.dtype)).sum(1)
        if dlse is not None:
            delta -= dlse[at]
        ds = scale * p * (do_ @ v_.mT - delta[:, None])
        found["dq"][at] = ds @ k_
        found["dk"][at][:n] = ds.mT @ q_
        found["dv"][at][:n] = p.mT @ do_
    return found
