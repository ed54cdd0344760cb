"""Gives the problems of operators in a step of the neural process, and their columns in rows."""

from typing import Any

from tnp.dispatch.spec import Operator, Problem

# Sizes of the model in an operator's rows; attention's follow from its heads.
COLUMNS = {
    "attention": (),
    "add_rms_norm": ("d_model",),
    "mlp": ("d_model", "d_ff", "d_ff_storage"),
    "mixture_heads": ("d_model", "d_ff", "d_ff_storage", "n_components"),
    "mixture_nll": ("n_components",),
}
OF_TARGETS = ("mixture_heads", "mixture_nll")  # have no context rows


def in_step(operator: Operator, model: dict, run: dict) -> tuple[Problem, dict[str, Any]] | None:
    """Returns an operator's problem in a step and how its values are drawn, or None without one.

    Args:
        operator: the operator.
        model: sizes of the model, `d_ff_storage` among them.
        run: batch, n_context, n_target and dtype of the step.
    """
    problem = operator.within(model, run)
    if problem is None:
        return None
    padded = "d_ff" in operator.sizes and problem["d_ff"] != model["d_ff"]
    return problem, {"d_ff_real": model["d_ff"]} if padded else {}


def columns(op: str, shape: dict, model: dict) -> dict[str, int]:
    """Returns the sizes in an operator's row of a step; {} for operators not in `COLUMNS`.

    Older rows had these columns before rows had problems. With them, old and new rows have the same
    comparison key.

    Args:
        op: its name.
        shape: batch, n_context and n_target of the step.
        model: sizes of the model, `d_ff_storage` among them, as in config.yaml.
    """
    if op not in COLUMNS:
        return {}
    n_context = 0 if op in OF_TARGETS else shape["n_context"]
    rows = {"batch": shape["batch"], "n_q": n_context + shape["n_target"]}
    if op == "attention":  # every row has a query, context rows have keys
        n_heads = model["n_heads"]
        head_dim = model["d_model"] // n_heads
        return rows | {"n_k": n_context, "n_heads": n_heads, "head_dim": head_dim}
    known = model | {"d_ff_storage": model.get("d_ff_storage") or model["d_ff"]}
    return rows | {name: known[name] for name in COLUMNS[op]}
