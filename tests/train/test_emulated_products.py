"""Tests that emulated products round both operands of each pass, as a formula says."""

import pytest
import torch

from tnp.store.schemas import EMULATED
from tnp.train.emulated_products import FORMATS, ROWS, emulated, rounded


def normal(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes))).bfloat16()


def test_the_store_lists_the_formats():
    assert tuple(FORMATS) == EMULATED


@pytest.mark.parametrize("format_, bits", [(torch.float8_e4m3fn, 3), (torch.float8_e5m2, 2)])
def test_a_value_moves_by_half_a_step_of_its_format(format_, bits):
    x = normal(2 * ROWS + 3, 5) * torch.logspace(-12, 12, 2 * ROWS + 3, 2).view(-1, 1).bfloat16()
    for dim in (0, 1):
        found = rounded(x, dim, format_, True).double()
        for start in range(0, len(x), ROWS) if dim == 0 else [0]:
            rows = slice(start, start + ROWS) if dim == 0 else slice(None)
            block, most = x[rows].double(), x[rows].double().abs().max()
            bound = block.abs() * 2.0**-bits / 2 + most * 2.0**-15
            assert ((found[rows] - block).abs() <= bound).all()
    assert torch.equal(rounded(torch.zeros_like(x), 0, format_, True), torch.zeros_like(x))


def test_without_a_scale_small_values_vanish_and_large_ones_saturate():
    x = torch.tensor([[1e-5, 1e4]]).bfloat16()
    assert rounded(x, 0, torch.float8_e4m3fn, False).tolist() == [[0.0, 448.0]]
    assert rounded(x, 0, torch.float8_e5m2, True)[0, 1].item() == pytest.approx(1e4, rel=0.13)


def test_both_passes_of_a_linear_layer_take_rounded_operands():
    x, w, g = normal(7, 4), normal(6, 4), normal(7, 6)
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    with emulated("e5m2"):
        y = torch.nn.functional.linear(*leaves)
        y.backward(g)

    def of(t: torch.Tensor, dim: int) -> torch.Tensor:
        return rounded(t, dim, torch.float8_e5m2, True)

    assert torch.equal(y, of(x, 0) @ of(w, 0).T)
    assert torch.allclose(leaves[0].grad.float(), (of(g, 0) @ of(w, 1)).float(), rtol=1e-2)
    assert torch.allclose(leaves[1].grad.float(), (of(g, 1).T @ of(x, 1)).float(), rtol=1e-2)
    assert not torch.equal(y, x @ w.T)


def test_an_operand_may_be_transposed():
    x = normal(ROWS, 2 * ROWS)
    for dim in (0, 1):
        expected = rounded(x, dim, torch.float8_e4m3fn, True)
        assert torch.equal(rounded(x.T, 1 - dim, torch.float8_e4m3fn, True), expected.T)


def test_attention_is_not_rounded():
    q, k, v = (normal(1, 2, n, 64) for n in (5, 6, 7))
    k, v = k[:, :, :5], v[:, :, :5]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    with emulated("e5m2"):
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert torch.equal(found, expected)


def test_float32_no_format_and_what_is_left_out_are_not_rounded():
    x = normal(3, 3)
    with emulated("e5m2"):
        assert torch.equal(x.float() @ x.float(), x.float().mm(x.float()))
        found = x.float() @ x.float()
    assert torch.equal(found, x.float() @ x.float())
    for name in ("", "e5m2"):
        with emulated(name) as unrounded:
            found = unrounded(torch.mm)(x, x)
            rounds = not torch.equal(x @ x, found)
        assert torch.equal(found, x @ x) and rounds == (name == "e5m2")
