"""Tests that `torch.autocast` changes nothing of operators and models of ours."""

from functools import partial

import pytest
import torch

from tests.model.test_transformer_np import build, make_task
from tests.ops.every_operator import EVERY, drawn
from tests.ops.problems import DEVICE
from tnp.ops.swiglu import swiglu

AUTOCAST = [torch.bfloat16, torch.float16]


@EVERY
def test_autocast_changes_nothing(operator, found, case):
    some, outputs = drawn(operator, found, case)
    leaves = [x.requires_grad_(found.differentiable) for x in some]

    def results() -> list[torch.Tensor]:
        made = outputs(*leaves)
        wanted = [x for x in made if x.requires_grad]
        ones = [torch.ones_like(x) for x in wanted]
        return made + list(torch.autograd.grad(wanted, leaves, ones) if wanted else [])

    expected = results()
    for dtype in AUTOCAST:
        with torch.autocast(DEVICE.type, dtype):
            torch.testing.assert_close(results(), expected, rtol=0, atol=0, equal_nan=True)


def test_autocast_around_a_compiled_operator_changes_nothing():
    gate, up = torch.randn(2, 3, 20, device=DEVICE)
    compiled = torch.compile(partial(swiglu, implementation="triton"), backend="aot_eager")
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert torch.equal(compiled(gate, up), swiglu(gate, up, implementation="triton"))


OURS = dict.fromkeys(("attention", "projection", "mlp", "rms_norm", "mixture_heads"), "fused")


@pytest.mark.parametrize("spec", [{}, OURS])
@pytest.mark.parametrize("autocast_dtype", AUTOCAST)
def test_autocast_around_a_model_changes_nothing(spec, autocast_dtype):
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    model, task = build(dtype=dtype, **spec).to(DEVICE), make_task().to(DEVICE)

    def results(enabled: bool) -> list[torch.Tensor]:
        with torch.autocast(DEVICE.type, autocast_dtype, enabled=enabled):
            loss, prediction = model.loss(task), model.predict(task.context, task.x_target)
        return [loss, prediction.mean, *torch.autograd.grad(loss, list(model.parameters()))]

    for found, expected in zip(results(True), results(False), strict=True):
        assert torch.equal(found, expected)
