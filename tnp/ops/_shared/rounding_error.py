"""Estimates the rounding error of a result in float32, for any implementation.

A floor is computed in float64 from only the inputs. One rounding changes a number by at most its
share u = 2⁻²⁴. If the change is evenly spread, its variance is u²/3 times the square of the number.
Roundings count as independent, and first derivatives carry their variances to the result. A floor
is the square root of these variances, summed over a result's elements. It estimates ‖computed −
exact‖. docs/decisions/008-error-budget.md says the same in words.
"""

import torch

# The variance of one rounding to float32, relative to the square of the number.
ROUNDING = 2.0**-48 / 3
# An exponential or a logarithm on a GPU is accurate to two units in the last place, which are 4 u.
EXPONENTIAL = 16 * ROUNDING

# The norm that stands for a result of zeros, which has no relative error.
LEAST_NORM = 1e-30

Floors = dict[str, float]  # each result's floor


def of_sum(n: int | torch.Tensor, total: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    """Returns the variance of a float32 sum of n products, from their exact sum and sum of squares.

    Products are assumed to be added one after the other, in an order independent of their sizes.
    The squares of all partial sums then add up to (n + 1)(2 total² + squares)/6. Each partial sum
    is rounded, and so is each product.
    """
    return ROUNDING * ((n + 1) / 6 * (2 * total.square() + squares) + squares)


def of_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns the variance of each element of a @ b in float32; a and b are exact, in float64."""
    return of_sum(a.shape[-1], a @ b, a.square() @ b.square())


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    scale: float,
    seen: torch.Tensor | None = None,
) -> Floors:
    """Returns the floors of o, dq, dk, dv, and of lse in nats.

    q and do [B, H, n_q, D], k and v [B, H_kv, n_k, D]; `seen` broadcasts to [B, 1, n_q, n_k] and
    says which keys a query sees. Heads are computed one at a time to limit the memory.
    """
    sums: dict[str, torch.Tensor] = {}
    for b in range(q.shape[0]):
        of_sample = None if seen is None else seen.expand(q.shape[0], 1, *seen.shape[-2:])[b, 0]
        for h in range(q.shape[1]):
            at = h * k.shape[1] // q.shape[1]  # grouped heads share keys
            rows = (q[b, h], k[b, at], v[b, at], do[b, h])
            variances = _head(*(x.detach().double() for x in rows), scale, of_sample)
            for name, variance in variances.items():
                sums[name] = sums.get(name, 0.0) + variance.sum()
    return {name: total.sqrt().item() for name, total in sums.items()}


def _head(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    scale: float,
    seen: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """Returns the variances of one head's results; 0 where nothing is seen."""
    n_keys = len(k)
    if seen is not None:
        seen = seen.expand(len(q), len(k))
        sees, is_seen = seen.any(1), seen.any(0)
        q, do, k, v, seen = q[sees], do[sees], k[is_seen], v[is_seen], seen[sees][:, is_seen]
        n_keys = seen.sum(1, keepdim=True)
    q = scale * q
    scores = q @ k.mT
    hidden = scores if seen is None else scores.masked_fill(~seen, float("-inf"))
    lse = hidden.logsumexp(-1, keepdim=True)
    p = (hidden - lse).exp()
    # The error of a score is the relative error of its weight. A score is rounded once more when
    # its scale is applied, and the scale to base 2 is rounded itself.
    weight = of_product(q, k.mT) + 2 * ROUNDING * scores.square() + EXPONENTIAL

    # o = Σ p v / Σ p: an error in a weight moves o along v − o.
    o = p @ v
    moved = p.square() * weight
    spread = moved @ v.square() - 2 * o * (moved @ v) + o.square() * moved.sum(-1, keepdim=True)
    total = of_sum(n_keys, torch.ones_like(lse), p.square().sum(-1, keepdim=True))
    var_o = spread + of_product(p, v) + o.square() * (total + 2 * ROUNDING)

    # lse is a rounded maximum plus a logarithm, and the sum is rounded again.
    var_lse = moved.sum(-1, keepdim=True) + total + 2 * ROUNDING * lse.square() + EXPONENTIAL

    # The backward pass computes p = exp(s − lse) and ds = p (dp − delta), dp = do·v, delta = do·o.
    delta = (do * o).sum(-1, keepdim=True)
    var_delta = of_sum(q.shape[-1], delta, (do * o).square().sum(-1, keepdim=True))
    var_delta = var_delta + (do.square() * var_o).sum(-1, keepdim=True)
    ds = p * (do @ v.mT - delta)
    var_ds = ds.square() * (weight + 2 * ROUNDING) + p.square() * of_product(do, v.mT)
    # lse and delta belong to a row: their errors add up over its keys, not over queries.
    dq = ds @ k
    var_dq = var_ds @ k.square() + var_lse * dq.square() + var_delta * (p @ k).square()
    var_ds_of_keys = var_ds + var_lse * ds.square() + var_delta * p.square()
    return {
        "o": var_o,
        "dq": scale**2 * (var_dq + of_product(ds, k)),
        "dk": var_ds_of_keys.mT @ q.square() + of_product(ds.mT, q),
        "dv": (p.square() * (weight + var_lse)).mT @ do.square() + of_product(p.mT, do),
        "lse": var_lse,
    }
