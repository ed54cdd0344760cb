"""Tests that a normalization comes from its points, and that values fit the model's dtype."""

import numpy as np
import pytest
import torch

from tests.model.test_transformer_np import build, make_task
from tests.refusals import assert_refused
from tnp.model.transformer_np import TransformerNP
from tnp.tasks.normalization import Normalization
from tnp.tasks.task import Task
from tnp.train.loop import HeldOut
from tnp.train.step import TrainingStep


@pytest.mark.parametrize(
    "dtype, deviation, value",
    [
        (torch.float32, None, 1e39),  # past float32
        (torch.float32, 1e-30, 1e10),
        (torch.bfloat16, None, 3e38),  # which a weight multiplies
        (torch.float16, None, 6e4),
        (torch.float64, 1e-200, 1e150),
    ],
)
def test_values_past_what_the_model_computes_with_are_named(dtype, deviation, value):
    """Where NaN is refused, finite values are that would become NaN."""
    model = build(dtype=dtype, attention="reference")
    model.normalization = deviation and Normalization([0.0], [deviation], [0.0], [deviation])
    for name in ("x_context", "y_context", "x_target", "y_target"):
        task = make_task().to(dtype=torch.float64)
        task = Task(*(deviation * x if deviation else x for x in list(task)[:4]))
        HeldOut([task])(model)  # the control
        getattr(task, name)[1, 2] = value
        message = rf"{name} of sample 1, point 2, is \[.*\]: a {dtype} model takes up to"
        runs = [lambda t=task: HeldOut([t])(model)]
        runs += [lambda t=task: TrainingStep(model, learning_rate=1e-3)(t)]
        if name.endswith("context"):
            runs += [lambda t=task: model.predict(t.context, t.x_target)]
        if name != "y_target":
            runs += [lambda t=task: model.sample_jointly(t.context, t.x_target)]
        for run in runs:
            with pytest.raises(ValueError, match=message):
                run()


def test_a_normalization_is_that_of_its_points():
    x, plain = torch.tensor([[0.0, 3.0], [2.0, 3.0]]), build()
    units = Normalization.of(x, torch.tensor([[1.0], [5.0]]).numpy())
    expected = {"x_mean": [1.0, 3.0], "x_deviation": [1.0, 1.0]}
    assert units.numbers() == expected | {"y_mean": [3.0], "y_deviation": [2.0]}
    constant = torch.full((1000, 1), 0.1, dtype=torch.float64)
    assert Normalization.of(constant, constant).numbers()["x_deviation"] == [1.0]
    assert "x_mean=[1.0, 3.0]" in repr(units)

    def model(normalization):
        return lambda: TransformerNP(plain.config, plain.variant, normalization=normalization)

    of_points = r"x is \(.*\): it must be \[points, d_x\], of at least"
    assert_refused(
        (lambda: Normalization([0.0], [1.0], [0.0], [0.0]), r"y_deviation is \[0.0\]: means must"),
        (lambda: Normalization([0.0, 0.0], [1.0], [0.0], [1.0]),
         r"x_mean is \[0.0, 0.0\] and x_deviation \[1.0\]: they m"),
        *((lambda p=p: Normalization.of(p, x), of_points)
          for p in (torch.zeros(3), torch.zeros(0, 1))),
        *((lambda n=n: Normalization([0.0], n, [0.0], [1.0]), "x_deviation is .*: it must be a l")
          for n in (1.0, np.array(1.0), torch.tensor(1.0))),
        (model(units), "normalization is of d_x 2 and d_y 1: TNPConfig says 1"),
    )  # fmt: skip
    assert_refused((model(units.numbers()), "normalization is a dict: it must"), error=TypeError)


@pytest.mark.parametrize(
    "offset, scale", [(1e9, 1e-4), (1.7e18, 1e5), (0.0, 1.0), (0.0, 1e200), (3e-310, 1e-312)]
)
def test_small_and_large_deviations_are_deviations(offset, scale):
    values = offset + scale * np.random.default_rng(0).normal(size=(1000, 1))
    exact = values.astype(np.longdouble)
    found = Normalization.of(values, values).numbers()
    assert found["y_deviation"] == pytest.approx([float(exact.std())], rel=1e-9)
    assert found["x_mean"] == pytest.approx([float(exact.mean())], rel=1e-15, abs=1e-9 * scale)


def test_a_normalization_is_of_the_values_that_are_there():
    x = np.arange(3.0)[:, None]
    missing = np.ma.array([[5.0], [-9999.0], [7.0]], mask=[[0], [1], [0]])
    expected = Normalization.of(x, np.array([[5.0], [7.0]])).numbers()
    assert Normalization.of(x, missing).numbers() == expected
    assert Normalization.of(x, missing.filled(np.nan)).numbers() == expected
    for value, what in ((np.nan, "missing in every point"), (np.inf, "infinite")):
        with pytest.raises(ValueError, match=f"y, dimension 0, is {what}: it must be finite"):
            Normalization.of(x, np.full((3, 1), value))
    with pytest.raises(ValueError, match="y holds timedelta64.s., not numbers: divide by a unit"):
        Normalization.of(x, np.ones((3, 1), "m8[s]"))
