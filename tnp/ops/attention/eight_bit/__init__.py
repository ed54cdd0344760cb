"""Defines attention in 8 bits (e4m3): its calls, and its rounding in PyTorch for the gate.

`quantize` says how q, k and v are held. The same is computed here once more in PyTorch. `held`
returns the rounded operands in float64. `rounded` returns the output in float64 with p rounded to
e4m3 too. Functions import torch when they run, because planning reads this module without torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from tnp.dispatch.spec import Call, Case, Reason, Work, triton_from
from tnp.ops._shared import e4m3
from tnp.ops.attention import definition
from tnp.ops.attention.torch_forms import LN_2

if TYPE_CHECKING:
    from torch import Tensor


HEAD_DIM = 64
BLOCK = 128  # keys that share a scale and a reference
SAMPLED = 256  # the mean of keys, and of values, is taken over at most so many rows
# The smallest exponent of a scale, which zeros have. The ratio of two scales then cannot overflow
# while values are below 2^90.
LEAST = -40
# log2 of the factor of p. The largest p is then between 128 and 256, and e4m3 holds up to 448.
RANGE = 8.0
_triton = triton_from(89)


def supported(call: Call) -> Reason:
    """Returns why it cannot serve a call, or None. It needs tensor cores for e4m3, and D = 64."""
    if (reason := _triton(call)) is not None:
        return reason
    if call.problem["head_dim"] != HEAD_DIM:
        return f"it takes head_dim {HEAD_DIM}, not {call.problem['head_dim']}"
    return None


def work(case: Case, pass_: str) -> Work:
    """Returns the work of attention, with its products in e4m3."""
    least = definition.work(case, pass_)
    return Work({"e4m3": sum(least.flops.values())}, least.read, least.written)


# -------------------------------------------------------------------------------- the number format


class Head(NamedTuple):
    """Holds one head of a sample, rounded to 8 bits, in float64 [L, D], with centred keys and
    values.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    vector: Tensor  # [D], which was subtracted from the values


def centred(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x [n, D] minus the mean of some rows, rounded in blocks, and that float32 mean."""
    import torch
    from torch.nn.functional import pad

    n = len(x)
    sampled = min(n, SAMPLED)
    vector = x[torch.arange(sampled, device=x.device) * n // sampled].float().mean(0)
    blocks = pad(x.float() - vector, (0, 0, 0, -n % BLOCK)).unflatten(0, (-1, BLOCK))
    return e4m3.scaled(blocks, (1, 2), LEAST).flatten(0, 1)[:n], vector


def heads(inputs: Mapping[str, Tensor | None]) -> Iterator[tuple[tuple[int, int], int, Head]]:
    """Yields (sample, head), the sample's number of keys, and the head as 8 bits hold it."""
    q, k, v, n_keys = (inputs[name] for name in ("q", "k", "v", "n_keys"))
    for b in range(q.shape[0]):
        n = k.shape[2] if n_keys is None else int(n_keys[b])
        for h in range(q.shape[1]):
            of_keys, _ = centred(k[b, h, :n])
            of_values, vector = centred(v[b, h, :n])
            of_queries = e4m3.scaled(q[b, h].float(), (1,), LEAST)
            yield (b, h), n, Head(of_queries, of_keys, of_values, vector.double())


def held(case: Case, inputs: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Returns q, k and v in float64 as the kernel gets them. Keys lack their mean: it is exact."""
    import torch

    found = {name: torch.zeros_like(inputs[name], dtype=torch.float64) for name in "qkv"}
    for at, n, head in heads(inputs):
        found["q"][at] = head.q
        found["k"][at][:n] = head.k
        found["v"][at][:n] = head.v + head.vector
    return found


def rounded(
    case: Case, inputs: Mapping[str, Tensor | None], upstream: object = None
) -> dict[str, Tensor]:
    """Returns o in float64 from q, k, v and p as 8 bits hold them. There are no gradients.

    p is relative to the reference of online softmax over blocks of 128 keys, rounded up to a whole
    number. The last block comes first.
    """
    import torch
    from torch.nn.functional import pad

    scale_log2 = 1.0 if case.problem["base2"] else definition.SCALE / LN_2
    o = torch.zeros_like(inputs["q"], dtype=torch.float64)
    for at, n, head in heads(inputs):
        s = pad(scale_log2 * head.q @ head.k.mT, (0, -n % BLOCK), value=float("-inf"))
        s = s.unflatten(1, (-1, BLOCK)).roll(1, 1)
        reference = s.amax(2).ceil().cummax(1).values
        p = torch.exp2(s - reference[:, :, None] + RANGE)
        weight = torch.exp2(reference - reference[:, -1:])[:, :, None]
        total = (p * weight).sum((1, 2))
        p = (e4m3.nearest(p) * weight).roll(-1, 1).flatten(1)[:, :n]
        o[at] = p @ head.v / total[:, None] + head.vector
    return {"o": o}
