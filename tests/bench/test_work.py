import pytest

from tnp.bench.step_flops import step_attention_flops, step_matmul_flops
from tnp.dispatch.registry import catalog
from tnp.dispatch.spec import Case, Work
from tnp.gates.buffer import in_training

MODEL = {"d_model": 512, "n_layers": 12, "n_heads": 8, "d_ff": 1365, "n_components": 10}


def test_steps_of_three_sizes_hold_the_known_numbers_of_operations():
    assert step_matmul_flops(MODEL, 64, 64, 500) == pytest.approx(7.7e12, rel=0.02)
    assert step_attention_flops(MODEL, 4, 10_000, 1_000) == pytest.approx(38e12, rel=0.02)
    assert step_attention_flops(MODEL, 1, 200_000, 5_000) == pytest.approx(3.5e15, rel=0.02)


def test_matmul_operations_by_hand():
    model = {"d_model": 2, "n_layers": 1, "n_heads": 1, "d_ff": 3, "n_components": 2}
    rows, targets = 1 * (1 + 1), 1
    embed = 2 * rows * (3 * 2 + 2 * 2)
    block = 2 * rows * (2 * 6 + 2 * 2 + 2 * 3 + 3 * 2)
    heads = 2 * targets * 2 * (2 * 3 + 3 * 3)
    assert step_matmul_flops(model, 1, 1, 1) == 3 * (embed + block + heads)


def test_what_nobody_reads_is_not_counted():
    """Counts by hand, with two layers: keys and values of targets; the last block of contexts."""
    model = {"d_model": 2, "n_layers": 2, "n_heads": 1, "d_ff": 3, "n_components": 2}
    batch, n_context, n_target = size = (5, 7, 11)
    targets_kv = 2 * batch * n_target * (2 * 2 + 2 * 2) * 2
    contexts_q_o_mlp = 2 * batch * n_context * (2 * 2 + 2 * 2 + 2 * 3 + 3 * 2)
    skipped = step_matmul_flops(model, *size) - step_matmul_flops(model, *size, skip_unread=True)
    assert skipped == 3 * (targets_kv + contexts_q_o_mlp)
    skipped = step_attention_flops(model, *size) - step_attention_flops(
        model, *size, skip_unread=True
    )
    assert skipped == 7 * 2 * batch * n_context * n_context * 2


def test_a_buffers_rows_are_counted_too():
    """Counts by hand: 2 of 5 targets enter, and one group of as many sees them."""
    model = {"d_model": 2, "n_layers": 2, "n_heads": 1, "d_ff": 3, "n_components": 2}
    size, buffered = (5, 7, 5), model | {"buffer": 2}
    embed, kv, q_o_mlp = 3 * 2 + 2 * 2, 2 * 2 * 2, 2 * 2 + 2 * 2 + 2 * 3 + 3 * 2
    more = 2 * 5 * 2 * (embed + 2 * (kv + q_o_mlp))
    found = step_matmul_flops(buffered, *size) - step_matmul_flops(model, *size)
    assert found == 3 * more
    found = step_matmul_flops(buffered, *size, True) - step_matmul_flops(model, *size, True)
    assert found == 3 * (more - 2 * 5 * 2 * q_o_mlp)  # of the last block, keys and values alone
    # Points of the buffer see 7 + 1 and 7 + 2 keys, their followers 1 and 2 more than before.
    a_pair = 7 * 2 * 5 * 2
    found = step_attention_flops(buffered, *size) - step_attention_flops(model, *size)
    assert found == a_pair * 2 * (8 + 9 + 3)
    found = step_attention_flops(buffered, *size, True) - step_attention_flops(model, *size, True)
    assert found == a_pair * ((8 + 9 + 3) + 3)
    # As many pairs as the training's mask lets through, with several groups and a target too many.
    entering, seen = in_training(13, 3)
    pairs = sum(7 + i + 1 for i in range(len(entering))) + sum(7 + n for n in seen) + 7 * 7
    found = step_attention_flops(model | {"buffer": 3, "n_layers": 1}, 1, 7, 13)
    assert found == 7 * 2 * 2 * pairs


def work(op: str, pass_: str, dtype: str = "bfloat16", d_ff_real: int = 0, **sizes: int) -> Work:
    """Returns the work that an operator declares."""
    operator = catalog().operator(op)
    return operator.work(Case(operator.problem(dtype, **sizes), (("d_ff_real", d_ff_real),)), pass_)


def test_bytes_count_each_operand_once():
    many = {"batch": 64, "n_heads": 8, "n_q": 564, "n_k": 64, "head_dim": 64}
    assert work("attention", "forward", **many).bytes == 64 * 8 * 64 * 2 * (2 * 564 + 2 * 64)
    few = {"batch": 1, "n_heads": 1, "n_q": 3, "n_k": 2, "head_dim": 16}
    assert work("attention", "backward", "float32", **few).bytes == 16 * 4 * (4 * 3 + 4 * 2)


def test_operators_on_rows_by_hand():
    norm, weight = {"rows": 7, "width": 512}, 4 * 512
    assert work("add_rms_norm", "forward", **norm).bytes == 7 * 512 * 2 * 4 + weight
    assert work("add_rms_norm", "backward", **norm).bytes == 7 * 512 * 2 * 4 + 2 * weight
    mlp = {"rows": 7, "d_model": 512, "d_ff": 1408, "d_ff_real": 1365}
    forward, backward = work("mlp", "forward", **mlp), work("mlp", "backward", **mlp)
    assert forward.flops == {"bfloat16": 2 * 7 * (512 * 1365 + 1365 * 512)}
    assert backward.flops["bfloat16"] == 2 * forward.flops["bfloat16"]
    weights = 4 * (1408 * 512 + 512 * 1408)
    assert forward.bytes == 2 * 7 * (512 + 512) + weights
    assert backward.bytes == 2 * 7 * 3 * 512 + 2 * weights
    heads = {"rows": 7, "d_model": 512, "d_ff": 1365, "n_components": 10, "n_outputs": 3}
    forward, backward = (work("mixture_heads", pass_, **heads) for pass_ in ("forward", "backward"))
    assert forward.flops == {"bfloat16": 2 * 7 * 10 * (512 * 1365 + 1365 * 3)}
    weights = 4 * 10 * (1365 * 512 + 3 * 1365)
    assert forward.bytes == 2 * 7 * (512 + 30) + weights
    assert backward.bytes == 2 * 7 * (512 + 512 + 30) + 2 * weights
    nll = {"rows": 7, "n_components": 10, "d_y": 1}
    loss = 4  # bytes, the one number that is written
    assert work("mixture_nll", "forward", "float32", **nll).bytes == 4 * 7 * (30 + 1) + loss
    assert work("mixture_nll", "backward", "float32", **nll).bytes == 4 * 7 * (30 + 30 + 1)


def test_a_steps_operations_are_those_of_its_operators():
    rows, targets = 64 * 564, 64 * 500
    one = dict(MODEL, n_layers=1)
    mlp, heads = (
        work(op, "forward", **sizes).flops["bfloat16"]
        for op, sizes in (
            ("mlp", {"rows": rows, "d_model": 512, "d_ff": 1365}),
            (
                "mixture_heads",
                {"rows": targets, "d_model": 512, "d_ff": 1365, "n_components": 10, "n_outputs": 3},
            ),
        )
    )
    rest = 2 * rows * (3 * 512 + 512**2 + 4 * 512**2)
    assert step_matmul_flops(one, 64, 64, 500) == 3 * (mlp + heads + rest)
