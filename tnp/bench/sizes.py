"""What each operator that can be benchmarked works on in a step of the model."""

# Sizes of the model that an operator's benchmark needs; attention's follow from its heads.
OPERATOR_SIZES = {
    "attention": (),
    "rms_norm": ("d_model",),
    "mlp": ("d_model", "d_ff", "d_ff_storage"),
    "mixture_heads": ("d_model", "d_ff", "d_ff_storage", "n_components"),
    "mixture_nll": ("n_components",),
}
# The device's own limits, through PyTorch: no implementations to choose from, no backward pass.
CEILINGS = ("matmul", "copy")
OF_TARGETS = ("mixture_heads", "mixture_nll")  # these see no context row


def operator_sizes(op: str, shape: dict, model: dict, d_ff_storage: int | None) -> dict[str, int]:
    """Columns of the operator's "ops" row; sizes it does not have are left out.

    Args:
        op: one of `OPERATOR_SIZES`.
        shape: batch, n_context and n_target of the step.
        model: sizes of the model, as in config.yaml.
        d_ff_storage: the width that hidden layers are zero-padded to; d_ff where None.
    """
    n_context = 0 if op in OF_TARGETS else shape["n_context"]
    rows = {"batch": shape["batch"], "n_q": n_context + shape["n_target"]}
    if op == "attention":  # every row asks, context rows answer
        n_heads = model["n_heads"]
        head_dim = model["d_model"] // n_heads
        return rows | {"n_k": n_context, "n_heads": n_heads, "head_dim": head_dim}
    known = model | {"d_ff_storage": d_ff_storage or model["d_ff"]}
    return rows | {name: known[name] for name in OPERATOR_SIZES[op]}
