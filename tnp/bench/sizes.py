"""Problems of operators in a step of the neural process, and what their rows say of it."""

from typing import Any

from tnp.dispatch.spec import Operator, Problem

# Sizes of the model that stand in rows of an operator; attention's follow from its heads.
COLUMNS = {
    "attention": (),
    "add_rms_norm": ("d_model",),
    "mlp": ("d_model", "d_ff", "d_ff_storage"),
    "mixture_heads": ("d_model", "d_ff", "d_ff_storage", "n_components"),
    "mixture_nll": ("n_components",),
}
OF_TARGETS = ("mixture_heads", "mixture_nll")  # these see no context row


def in_step(operator: Operator, model: dict, run: dict) -> tuple[Problem, dict[str, Any]] | None:
    """An operator's problem in a step, and how its values are drawn; None where it has none.

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
    """Sizes of an operator's row in a step: those that rows have had since before problems stood
    in them, so that old and new ones are the same question. None of another operator.

    Args:
        op: its name.
        shape: batch, n_context and n_target of the step.
        model: sizes of the model, `d_ff_storage` among them, as in config.yaml.
    """
    if op not in COLUMNS:
        return {}
    n_context = 0 if op in OF_TARGETS else shape["n_context"]
    rows = {"batch": shape["batch"], "n_q": n_context + shape["n_target"]}
    if op == "attention":  # every row asks, context rows answer
        n_heads = model["n_heads"]
        head_dim = model["d_model"] // n_heads
        return rows | {"n_k": n_context, "n_heads": n_heads, "head_dim": head_dim}
    known = model | {"d_ff_storage": model.get("d_ff_storage") or model["d_ff"]}
    return rows | {name: known[name] for name in COLUMNS[op]}
