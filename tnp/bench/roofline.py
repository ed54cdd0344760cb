"""Operations and bytes counted by hand, and the datasheet rates no honest row can exceed.

Operations of a training step, one multiply-add counted as two, with T = B·(M+N) rows and
d_in = d_x + d_y + 1:

    embed      2·T·(d_in·d_model + d_model²)
    block      2·T·(3·d_model² + d_model² + 2·d_model·d_ff)          + attention 4·B·(M+N)·M·d_model
    heads      2·B·N·n_components·(d_model·d_ff + d_ff·(1 + 2·d_y))

forward; a matmul's backward is twice its forward (one product for each operand's gradient),
attention's 2.5 times (five products for two, the scores being recomputed). These are the model's
operations: d_ff is the logical width, and neither padding nor a checkpoint's recomputation changes
the count. `skip_unread` leaves out keys and values of targets, and in the last block everything of
context points but their keys and values. Norms, SiLU and the optimizer are left out.
"""

# Dense bf16/fp16 tensor-core FLOP/s and memory bytes/s (NVIDIA datasheets), by part of the name.
DATASHEET = {
    "H200": (989.4e12, 4.8e12),
    "H100 PCIe": (756e12, 2.04e12),
    "H100 NVL": (835.5e12, 3.94e12),
    "H100": (989.4e12, 3.36e12),
    "A100-SXM4-80GB": (312e12, 2.04e12),
    "A100 80GB": (312e12, 1.94e12),
    "A100": (312e12, 1.56e12),
}


def attention_flops(
    batch: int, n_heads: int, n_q: int, n_k: int, head_dim: int, pass_: str
) -> float:
    """Two matmuls forward, five backward: the scores, dv, dp, dq and dk."""
    matmuls = {"forward": 2.0, "backward": 5.0}[pass_]
    return matmuls * 2.0 * batch * n_heads * n_q * n_k * head_dim


def step_matmul_flops(
    model: dict, batch: int, n_context: int, n_target: int, skip_unread: bool = False
) -> float:
    """Operations outside attention of one training step; `model` as `TNPConfig`'s fields."""
    d_model, d_ff = model["d_model"], model["d_ff"]
    d_x, d_y = model.get("d_x", 1), model.get("d_y", 1)
    contexts, targets = batch * n_context, batch * n_target
    embed = 2 * (contexts + targets) * ((d_x + d_y + 1) * d_model + d_model**2)
    block = 2 * (contexts + targets) * (4 * d_model**2 + 2 * d_model * d_ff)
    heads = 2 * targets * model["n_components"] * d_ff * (d_model + 1 + 2 * d_y)
    unread = 0
    if skip_unread:
        unread = 2 * targets * 2 * d_model**2 * model["n_layers"]
        unread += 2 * contexts * (2 * d_model**2 + 2 * d_model * d_ff)
    return 3.0 * (embed + model["n_layers"] * block + heads - unread)


def step_attention_flops(
    model: dict, batch: int, n_context: int, n_target: int, skip_unread: bool = False
) -> float:
    """Operations of all attention layers of one training step."""
    n_heads, n_layers = model["n_heads"], model["n_layers"]

    def layer(n_q: int) -> float:
        size = (batch, n_heads, n_q, n_context, model["d_model"] // n_heads)
        return attention_flops(*size, "forward") + attention_flops(*size, "backward")

    everyone = n_context + n_target
    return (n_layers - 1) * layer(everyone) + layer(n_target if skip_unread else everyone)


def above_ceiling(
    device_name: str, dtype: str, tflops: float | None, gb_per_s: float
) -> str | None:
    """Why a measured rate is impossible on this device; None if it is not, or not known to be."""
    part = next((part for part in DATASHEET if part in device_name), None)
    if part is None:
        return None
    flops_per_s, bytes_per_s = DATASHEET[part]
    if tflops is not None and dtype in ("bfloat16", "float16") and tflops > flops_per_s / 1e12:
        return f"{tflops:.0f} TFLOP/s is above what {part} can do, {flops_per_s / 1e12:.0f}"
    if gb_per_s > bytes_per_s / 1e9:
        return f"{gb_per_s:.0f} GB/s is above what {part} can do, {bytes_per_s / 1e9:.0f}"
    return None
