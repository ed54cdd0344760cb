"""The variants that a switch of the model is checked with."""

import torch

from tnp.gates import models
from tnp.ops import registry
from tnp.variants import OPERATORS

CPU = torch.device("cpu")


def test_variants_are_every_attention_alone_and_all_operators_of_ours():
    *alone, (implementation, ours) = models.variants(CPU)
    assert [name for name, _ in alone] == list(models.implementations(CPU))
    assert all(variant.attention == name for name, variant in alone)
    assert implementation == "fused"
    assert ours.implementations() == dict.fromkeys(OPERATORS, "fused")
    assert ours.skip_unread and ours.d_ff_storage == models.scale(CPU).d_ff_storage


def test_ours_are_left_out_where_one_of_them_cannot_run(monkeypatch):
    check = registry.check

    def without_mlp(op, *args):
        if op == "mlp":
            raise RuntimeError("cannot run here")
        return check(op, *args)

    monkeypatch.setattr(registry, "check", without_mlp)
    assert all(variant.mlp == "torch" for _, variant in models.variants(CPU))
