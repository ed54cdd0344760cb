"""Runs PyTorch's SDPA, compiled, where the plain form of an operator has all scores in memory."""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tnp.dispatch.spec import Implementation
from tnp.ops.attention.torch_forms import softmax_scale, visible
from tnp.ops.buffered_attention import definition
from tnp.ops.mlp import OPERATOR as MLP
from tnp.ops.projection import LINEAR, PROJECT_QKV
from tnp.ops.rms_norm import ADD_RMS_NORM, RMS_NORM


def buffered(
    q: Tensor, k: Tensor, v: Tensor, n_keys: Tensor | None, scale: float, n_buffer: int,
    n_groups: int = 0, all_rows: bool = False, base2: bool = False,
) -> Tensor:  # fmt: skip
    """Computes attention around a causal buffer under one mask."""
    seen = definition.visible(q, k, n_keys, n_buffer, n_groups, all_rows)
    return scaled_dot_product_attention(q, k, v, seen, scale=softmax_scale(scale, base2))


def block(
    h: Tensor, update: Tensor | None, norm_attention: Tensor, qkv: Tensor, output: Tensor,
    norm_mlp: Tensor, up: Tensor, down: Tensor, n_keys: Tensor | None, eps: float, n_heads: int,
    n_q: int | None = None, n_k: int | None = None, centred: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Runs the layers of a transformer block in turn, as its reference does, with SDPA."""
    total = h if update is None else h + update
    x = RMS_NORM.reference(total, norm_attention, eps)
    of_means = n_keys if centred else None
    q, k, v = PROJECT_QKV.reference(x, qkv, of_means, n_heads, n_q=n_q, n_k=n_k, centred=centred)
    o = scaled_dot_product_attention(q, k, v, visible(q, k, n_keys, None, None))
    u = LINEAR.reference(o.transpose(1, 2).flatten(-2), output)
    total, x = ADD_RMS_NORM.reference(total[:, -q.shape[2] :], u, norm_mlp, eps)
    return total, MLP.reference(x, up, down)


TITLE = "compiled PyTorch with SDPA"
BUFFERED = Implementation(
    "compiled_sdpa", run=buffered, compile="default", options=definition.TAKEN, title=TITLE
)
BLOCK = Implementation(
    "compiled_sdpa", run=block, compile="default", options=("update", "n_keys", "centred"),
    title=TITLE,
)  # fmt: skip
