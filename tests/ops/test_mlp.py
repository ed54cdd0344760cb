"""Tests the feed-forward layer: chunks, padding, and tensors that it keeps.

The gate compares what is ours with float64 (`tests.gates.test_operators`).
"""

import pytest
import torch

from tests.ops.problems import assert_within_budget, by, setting
from tnp.dispatch import tuned_tables
from tnp.dispatch.spec import OWN
from tnp.gates.results import Setting
from tnp.ops.mlp import OPERATOR, composed, mlp

OURS = [
    own.name for own in OPERATOR.implementations if own.provider == OWN and own.forward is not None
]
ours = pytest.mark.parametrize("implementation", OURS)
IN_16_BITS = [name for name in OURS if name != "e4m3"]


def layer(rows: int = 70, d_ff: int = 48, real: int = 42) -> Setting:
    sizes = {"rows": rows, "d_model": 32, "d_ff": d_ff}
    return setting(OPERATOR, "fused", "bfloat16", {"d_ff_real": real}, **sizes)


@pytest.mark.parametrize("implementation", IN_16_BITS)
@pytest.mark.parametrize("chunk_rows", [32, 128])
def test_more_rows_than_are_saved_are_computed_again_in_chunks(
    implementation, chunk_rows, monkeypatch
):
    monkeypatch.setattr(composed, "SAVED_ROWS", 16)
    monkeypatch.setattr(composed, "CHUNK_ROWS", chunk_rows)
    tuned_tables.refresh()  # plans do not notice edited constants
    problem = layer()
    found = by(problem, implementation)
    tuned_tables.refresh()
    assert_within_budget(problem, found)


@ours
def test_padding_is_exact_and_has_no_gradient(implementation):
    """A hidden unit of weight 0 is 0 behind SiLU, and so are its gradients."""
    found = by(layer(), implementation)
    assert (found["dup"][42:] == 0).all() and (found["ddown"][:, 42:] == 0).all()


def test_inference_neither_writes_nor_keeps_hidden_rows():
    inputs = [x.requires_grad_() for x in layer().inputs.values()]
    with torch.no_grad():
        y = mlp(*inputs, implementation="fused")
    frozen = mlp(*(t.detach() for t in inputs), implementation="fused")
    trained = mlp(*inputs, implementation="fused")
    assert torch.equal(y, frozen) and torch.equal(y, trained)
    assert len(trained.grad_fn.saved_tensors) == 5 and y.grad_fn is None
    outputs, saved = composed.FORWARD_AGAIN.empty((), inputs)
    assert len(outputs) == 1 and saved == ()
