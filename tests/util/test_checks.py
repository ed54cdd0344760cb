"""Tests that numbers of Python, numpy and torch are taken wherever a number is meant."""

import numpy as np
import pytest
import torch

from tests.model.test_transformer_np import build
from tnp.model.buckets import Buckets
from tnp.ops.attention import attention
from tnp.ops.buffered_attention import buffered_attention
from tnp.ops.kv_cache.paged import PagedCache
from tnp.tasks.functions import FunctionTasks
from tnp.tasks.gaussian_process import GaussianProcessTasks
from tnp.train.step import TrainingStep
from tnp.util.checks import require_count, require_real

KINDS = {"numpy": np.int64, "array": np.array, "unsigned": np.uint8, "tensor": torch.tensor}
NO_NUMBERS = [
    True, np.True_, torch.tensor(True), "4", None, 4j, [4], np.array([4]), torch.tensor([4]),
    np.ma.masked, np.ma.array(4, mask=True),
]  # fmt: skip


@pytest.mark.parametrize("of", KINDS.values(), ids=KINDS)
def test_a_whole_number_is_a_count_and_a_number(of):
    count, real = require_count("n", of(4), at_least=1), require_real("r", of(4))
    assert (count, real) == (4, 4.0) and type(count) is int and type(real) is float
    assert Buckets(of(64), of(100)) == Buckets(64, 100)
    sizes, draw = (of(0), of(2), of(1), of(3), of(5)), GaussianProcessTasks().sample
    assert torch.equal(draw(*sizes).y_target, draw(0, 2, 1, 3, 5).y_target)
    points = [(torch.randn(40, 2).numpy(), torch.randn(40, 1).numpy())]
    sizes = {"batch": of(5), "n_context": (of(2), of(9)), "n_target": (3, 6), "seed": of(3)}
    plain = {"batch": 5, "n_context": (2, 9), "n_target": (3, 6), "seed": 3}
    found, expected = FunctionTasks(points, **sizes)(of(7)), FunctionTasks(points, **plain)(7)
    assert torch.equal(found.y_target, expected.y_target)
    with pytest.raises(ValueError, match="n is .*4.*: it must be a whole number, at least 5"):
        require_count("n", of(4), at_least=5)


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_what_is_no_number_is_named(value):
    with pytest.raises(ValueError, match="(?s)n is .*: it must be a whole number, at least 1"):
        require_count("n", value, at_least=1)
    with pytest.raises(ValueError, match="(?s)r is .*: it must be a number"):
        require_real("r", value)


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), np.array(0.5), torch.tensor(0.5)])
def test_a_fraction_is_a_number_and_no_count(value):
    assert require_real("r", value) == 0.5 and type(require_real("r", value)) is float
    with pytest.raises(ValueError, match="n is .*0.5.*: it must be a whole number, at least 1"):
        require_count("n", value, at_least=1)
    model, names = build(), ("learning_rate", "weight_decay", "max_grad_norm")
    step = TrainingStep(model, **dict.fromkeys(names, value))
    (group,) = step.optimizer.param_groups
    found = group["lr"], group["weight_decay"], step.max_grad_norm
    assert found == (0.5,) * 3 and {type(number) for number in found[1:]} == {float}
    for name in names:
        with pytest.raises(ValueError, match=f"{name} is True: it must be a number"):
            TrainingStep(model, **dict.fromkeys(names, value) | {name: True})


def test_a_number_gives_no_gradient_and_must_fit_float64():
    with pytest.raises(ValueError, match=r"r is a tensor that asks for a gradient: give r.item"):
        require_real("r", torch.tensor(0.5, requires_grad=True))
    with pytest.raises(ValueError, match="float64 ends at 1.8e308"):
        require_real("r", 10**400)


def test_operators_and_caches_count_with_numbers_of_numpy():
    q = torch.randn(1, 2, 6, 16)
    assert torch.equal(attention(q, q, q, window=np.int64(3)), attention(q, q, q, window=3))
    rows = [buffered_attention(q, q, q, n_buffer=n) for n in (2, np.int64(2))]
    assert torch.equal(*rows)
    sizes = {"page": 3, "n_layers": 2, "n_kv_heads": 1, "head_dim": 8}
    sizes = {name: np.int64(size) for name, size in sizes.items()}
    cache = PagedCache(np.int64(6), **sizes, dtype=torch.float32, device="cpu")
    cache.allocate(torch.tensor(4))
    assert cache.n_free == 4
