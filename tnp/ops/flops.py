"""Operations an operator needs, a multiply-add counted as two; recomputation is not counted."""


def attention_flops(
    batch: int, n_heads: int, n_q: int, n_k: int, head_dim: int, pass_: str
) -> float:
    """Two matmuls forward, five backward (the scores, dV, dP, dQ, dK)."""
    matmuls = {"forward": 2.0, "backward": 5.0}[pass_]
    return matmuls * 2.0 * batch * n_heads * n_q * n_k * head_dim
