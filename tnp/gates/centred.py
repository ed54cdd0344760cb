"""Checks that with centred keys the gradient of queries is accurate on trained models (phase 3).

Keys of a trained model share a vector that is several times as long as their differences. The
backward pass subtracts Σ_d do·o from the gradient of each score, with a rounded o. So rows of that
gradient do not quite sum to zero, and the remainder multiplies the shared vector. In 16 bits, dq of
every implementation that reads o is then wrong by several per cent. Keys without that vector have
the same softmax and the same gradients in real numbers, and an accurate dq.

`captured.pt` holds one head of each of three layers, on a held-out task: 128 rows of q and of the
gradient of o, and 512 rows of k and v (64 at small). The models are the specification's, trained by
`fused` with AdamW at 1e-4 on one H200. They took 1,500 steps on Gaussian processes at small, and
600 on images at mid. A key is stored as two bfloat16 numbers, which a projection adds up.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from tnp.gates import models
from tnp.gates.checks import Check, relative_error
from tnp.model.variants import Variant
from tnp.ops.attention import OPERATOR, attention
from tnp.ops.attention.few_keys import MAX_KEYS
from tnp.ops.attention.torch_forms import LN_2, reference
from tnp.ops.projection import project_qkv

CAPTURED = Path(__file__).with_name("captured.pt")
BOUND = 0.005  # bfloat16 rounds by up to 0.004
# With few keys the roundings of e4m3's forward pass do not average out: one H200 had 0.013.
BOUND_OF_8_BITS = 0.02
SCALE = 0.125
# Other arguments of the formula: every query sees every key.
_WHOLE = {"n_keys": None, "cu_seqlens_q": None, "cu_seqlens_k": None, "scale": SCALE}


def checks(device: torch.device) -> Iterator[Check]:
    yield from _in_real_numbers(device)
    for layer, captured in torch.load(CAPTURED, weights_only=True).items():
        q, k, v, do = (captured[name].to(device) for name in ("q", "k", "v", "do"))
        plain = partial(reference, **_WHOLE)
        exact = _dq(plain, q.double(), k.double().sum(1), v.double(), do.double())
        # A layer of `fused` makes queries with the scale, and rounds them.
        q_base2 = (q.float() * (SCALE / LN_2)).to(q.dtype)
        base2 = partial(reference, **_WHOLE, base2=True)
        exact_base2 = _dq(base2, q_base2.double(), k.double().sum(1), v.double(), do.double())
        # If one tile has all keys, our kernels do not read o. PyTorch's do, and are not checked.
        many = len(k) > MAX_KEYS
        for name in models.implementations(device):
            if not many and name not in _OWN:
                continue
            bound = BOUND_OF_8_BITS if name in _IN_8_BITS and not many else BOUND
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
                yield Check(f"{what}: centred keys", "relative_error", centred, bound, name)
                if many:
                    yield Check(f"control must fail: {what}: keys not centred", "relative_error",
                                whole, bound, name, larger_is_better=True)  # fmt: skip


def _in_real_numbers(device: torch.device) -> Iterator[Check]:
    """Checks that float64 losses and gradients are equal with and without centred keys."""
    model = models.build_model(device, Variant("plain", attention="reference"))
    batch = models.task(device, 0).to(dtype=torch.float64)
    whole, centred = (
        models.gradients_by_tensor(models.exact(model, skip_unread=True, centred_keys=how), batch)
        for how in (False, True)
    )
    yield from models.float64_checks(", keys centred against not", centred, whole)


_OWN = {own.name for own in OPERATOR.implementations if own.forward is not None}
_IN_8_BITS = {own.name for own in OPERATOR.implementations if own.precision}


def _keys(parts: torch.Tensor, projection: str, centred: bool) -> torch.Tensor:
    """Returns keys [n_k, D] in the dtype of parts [n_k, 2, D], which the projection adds up."""
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
    """Returns the gradient of q [n_q, D] through attention of one head."""
    q, k, v = (x[None, None].detach().requires_grad_() for x in (q, k, v))
    return torch.autograd.grad(run(q, k, v), (q, k, v), do[None, None])[0][0, 0]
