"""Tests the variants that gates of the model run."""

import torch

from tnp.gates import models
from tnp.model.variants import FAMILIES

CPU = torch.device("cpu")


def test_variants_are_every_attention_alone():
    variants = list(models.variants(CPU))
    assert [name for name, _ in variants] == list(models.implementations(CPU))
    for name, variant in variants:
        others = dict.fromkeys(FAMILIES, "torch") | {"attention": name}
        assert variant.implementations() == others and not variant.skip_unread


def test_ours_are_all_operators_of_ours():
    ours = models.ours(CPU, "separate")
    expected = dict.fromkeys(FAMILIES, "fused") | {"attention": "separate"}
    assert ours.implementations() == expected
    assert ours.skip_unread and ours.d_ff_storage == models.scale(CPU).d_ff_storage
