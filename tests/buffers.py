"""Models with a causal buffer and their tasks, as tests have them."""

from dataclasses import replace

import pytest
import torch

from tests.model.test_transformer_np import CONFIG, build, make_task
from tnp.model.transformer_np import TransformerNP
from tnp.tasks.task import Task

ROOM = 3
WITH = replace(CONFIG, buffer=ROOM)
F64 = {"dtype": torch.float64, "attention": "reference"}
LENGTHS = torch.tensor([7, 4], dtype=torch.int32)


def with_role(model: TransformerNP) -> TransformerNP:
    """Tells the buffer from the context, as a trained model does."""
    with torch.no_grad():
        model.embed.role.copy_(torch.linspace(-1, 1, len(model.embed.role)))
    return model


def exact(config=WITH, **spec) -> TransformerNP:
    return with_role(build(config, **(F64 | spec)).double())


def task_of(n_target: int, lengths=None, config=CONFIG) -> Task:
    task = make_task(config, n_target=n_target).to(dtype=torch.float64)
    return replace(task, context_lengths=lengths)


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


lengths = pytest.mark.parametrize("lengths", [None, LENGTHS])
