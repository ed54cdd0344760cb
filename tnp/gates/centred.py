"""Phase 3: with centred keys the gradient of queries is accurate on tensors of trained models.

Keys of a trained model share a vector that is several times as long as what tells them apart. The
backward pass takes Σ_d do·o off the gradient of each score, with o as it was rounded. Rows of that
gradient then do not quite sum to zero, and what is left over multiplies the shared vector: dq of
every implementation in 16 bits is off by several per cent. Keys less that vector have the same
softmax and the same gradients in real numbers, and with them dq is accurate.

`captured.pt` holds one head of each of three layers, on a held-out task: 128 rows of q and of the
gradient of o, and of k and v 512 rows, or the 64 that there are at small. The models are the
specification's, trained by `fused` with AdamW at 1e-4 on one H200: 1,500 steps on Gaussian
processes at small, and 600 on images at mid. A key stands there as the sum of two bfloat16 numbers,
from which a projection makes it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from tnp.gates import models
from tnp.gates.checks import Check, max_abs_error, relative_error
from tnp.model.variants import Variant
from tnp.ops.attention import OPERATOR, attention
from tnp.ops.attention.few_keys import MAX_KEYS
from tnp.ops.attention.torch_forms import LN_2, reference
from tnp.ops.projection import project_qkv

CAPTURED = Path(__file__).with_name("captured.pt")
# Some ten sums of up to a thousand products, each in an order of its own.
FLOAT64_BOUND = 1e-12
BOUND = 0.005  # bfloat16 resolves 0.004
SCALE = 0.125
# What else the formula takes: every query sees every key.
_WHOLE = {"n_keys": None, "cu_seqlens_q": None, "cu_seqlens_k": None, "scale": SCALE}


def checks(device: torch.device) -> Iterator[Check]:
    yield from _in_real_numbers(device)
    for layer, captured in torch.load(CAPTURED, weights_only=True).items():
        q, k, v, do = (captured[name].to(device) for name in ("q", "k", "v", "do"))
        plain = partial(reference, **_WHOLE)
        exact = _dq(plain, q.double(), k.double().sum(1), v.double(), do.double())
        # As a layer of `fused` has it: queries that carry the scale, rounded as they are made.
        q_base2 = (q.float() * (SCALE / LN_2)).to(q.dtype)
        base2 = partial(reference, **_WHOLE, base2=True)
        exact_base2 = _dq(base2, q_base2.double(), k.double().sum(1), v.double(), do.double())
        # Where one tile has all keys, ours take no rounded o into account and PyTorch's do.
        many = len(k) > MAX_KEYS
        for name in models.implementations(device):
            if not many and name not in _OWN:
                continue
            plain = partial(attention, scale=SCALE, implementation=name)
            base2 = partial(attention, base2=True, implementation=name)
            for projection, run, queries, expected in (
                ("torch", plain, q, exact), ("fused", plain, q, exact),
                ("fused", base2, q_base2, exact_base2),
            ):  # fmt: skip
                centred, whole = (
                    relative_error(_dq(run, queries, _keys(k, projection, how), v, do), expected)
                    for how in (True, False)
                )
                what = f"dq at {layer}, projection {projection}, attention {name}"
                what += ", base2" * (run is base2)
                yield Check(f"{what}: centred keys", "relative_error", centred, BOUND, name)
                if many:
                    yield Check(f"control must fail: {what}: keys not centred", "relative_error",
                                whole, BOUND, name, larger_is_better=True)  # fmt: skip


def _in_real_numbers(device: torch.device) -> Iterator[Check]:
    """In float64 a model gives the same loss and gradients with centred keys as without."""
    model = models.build_model(device, Variant("plain", attention="reference"))
    batch = models.task(device, 0).to(dtype=torch.float64)
    (loss, gradients), (centred_loss, centred) = (
        models.gradients_by_tensor(models.exact(model, skip_unread=True, centred_keys=how), batch)
        for how in (False, True)
    )
    yield Check("float64 loss, keys centred against not", "max_abs_error",
                max_abs_error(centred_loss, loss), FLOAT64_BOUND)  # fmt: skip
    for name, expected in gradients.items():
        yield Check(f"float64 gradient of {name}, keys centred against not", "relative_error",
                    relative_error(centred[name], expected), FLOAT64_BOUND)  # fmt: skip


_OWN = {own.name for own in OPERATOR.implementations if own.forward is not None}


def _keys(parts: torch.Tensor, projection: str, centred: bool) -> torch.Tensor:
    """[n_k, D] in the dtype of parts [n_k, 2, D], which the projection adds up."""
    n_k, _, head_dim = parts.shape
    weight = torch.zeros(6 * head_dim, 2 * head_dim, dtype=parts.dtype, device=parts.device)
    one = torch.eye(head_dim, dtype=parts.dtype, device=parts.device)
    weight[2 * head_dim : 3 * head_dim] = torch.cat([one, one], 1)
    x = parts.reshape(1, n_k, 2 * head_dim)
    return project_qkv(x, weight, 2, n_k=n_k, centred=centred, implementation=projection)[1][0, 0]


def _dq(
    run: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
) -> torch.Tensor:
    """The gradient of q [n_q, D] through attention of one head."""
    q, k, v = (x[None, None].detach().requires_grad_() for x in (q, k, v))
    return torch.autograd.grad(run(q, k, v), (q, k, v), do[None, None])[0][0, 0]
