"""Operations of a training step, counted by hand.

One multiply-add counts as two. T = B·(M+N) is the number of rows, d_in = d_x + d_y + 1. Forward:

    embed      2·T·(d_in·d_model + d_model²)
    block      2·T·(3·d_model² + d_model² + 2·d_model·d_ff)          + attention 4·B·(M+N)·M·d_model
    heads      2·B·N·n_components·(d_model·d_ff + d_ff·(1 + 2·d_y))

A matmul's backward is twice its forward: one product for each operand's gradient. Attention's is
2.5 times its forward: five products for two, because scores are recomputed. These are the model's
operations. d_ff is the logical width. Neither padding nor a checkpoint's recomputation changes the
count. `skip_unread` leaves out keys and values of targets. In the last block it leaves out all of
the context points but their keys and values. Norms, SiLU and the optimizer do not count.

A buffer of n points adds n known rows. There are g groups of n targets that see the buffer. In each
group, and among the buffer's rows, the i-th row attends to the context and i points of the buffer
(`tnp.model.causal_buffer`).
"""

from tnp.model.causal_buffer import n_entering, n_followed


def step_matmul_flops(
    model: dict, batch: int, n_context: int, n_target: int, skip_unread: bool = False
) -> float:
    """Returns the operations outside attention of one training step.

    `model` has the fields of `TNPConfig`.
    """
    d_model, d_ff = model["d_model"], model["d_ff"]
    d_x, d_y = model.get("d_x", 1), model.get("d_y", 1)
    entering = n_entering(model.get("buffer"), n_target)
    contexts, targets = batch * (n_context + entering), batch * n_target
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
    """Returns the operations of all attention layers of one training step."""
    entering = n_entering(model.get("buffer"), n_target)
    groups = n_followed(entering, n_target)

    def pairs(known: int, in_turn: int) -> int:
        """Counts the pairs of queries and keys in a layer."""
        return (known + n_target) * n_context + in_turn * entering * (entering + 1) // 2

    everyone = pairs(n_context + entering, 1 + groups)
    last = pairs(0, groups) if skip_unread else everyone
    # Two products forward; five backward: scores, dv, dp, dq and dk.
    products = (2.0 + 5.0) * 2.0 * model["d_model"]
    return products * batch * ((model["n_layers"] - 1) * everyone + last)
