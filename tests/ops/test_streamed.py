"""Tests the kernel that streams a weight past a few rows, with configurations of every kind."""

from dataclasses import dataclass, replace

import pytest
import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from tests.ops.problems import DEVICE, HERE
from tnp.dispatch import devices
from tnp.dispatch.launcher import Bound
from tnp.gates.checks import relative_error
from tnp.ops._shared.streamed import Config, Product, config_of, launch_of, streamed_kernel
from tnp.ops.quantized_linear.quantizer import dequantize_weight, quantize_weight

EPS = 1e-5
UNWRITTEN = 7.0
WHOLE = Config(16, 2, 3, 2048, 4)
PARTS = Config(16, 1, 1, 256, 4)  # 256 columns at a time
EIGHT = replace(WHOLE, rows=8)  # the other rows are another program's


@dataclass
class Given:
    """Holds a product's inputs, and what it writes."""

    product: Product
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        p, self.generator = self.product, torch.Generator().manual_seed(0)
        self.x, self.update = self.normal(p.n_rows, p.n_in), self.normal(p.n_rows, p.n_in)
        self.norm = self.normal(p.n_in), self.normal(p.n_in)
        self.weight, self.bias = self.normal(p.n_out, p.n_in), self.normal(p.n_out)
        self.codes = None
        if p.bits < 16:
            self.codes = quantize_weight(self.weight, p.bits, p.group, not p.zeros)
        self.sum = torch.full_like(self.x, UNWRITTEN)
        width = p.n_out // 2 if p.epilogue == "swiglu" else p.n_out
        self.y = torch.full((p.n_rows + 1, width), UNWRITTEN, dtype=self.dtype, device=DEVICE)
        self.places = self.y, self.y, self.y
        self.tables, self.lengths = (self.x, self.x), self.x

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(DEVICE, self.dtype)

    def launch(self, config: Config, *best: Tensor, integers: tuple[int, ...] = 6 * (0,)) -> int:
        """Launches the kernel. Returns its programs."""
        p, x, codes = self.product, self.x, self.codes
        config = replace(config, rows=min(config.rows, triton.next_power_of_2(p.n_rows)))
        grid, constants = launch_of(p, config, HERE, constant=True)
        rows = 0, p.n_in, 0, p.n_in, p.n_rows, p.n_rows, p.n_rows, p.n_out
        Bound(streamed_kernel, grid, *rows, *integers, **constants)(
            x, self.update, *self.norm, codes.weight.view(torch.int8) if codes else self.weight,
            codes.scales if codes else x, codes.zeros if p.zeros else x, self.bias, self.sum,
            self.y, *self.places, *self.tables, self.lengths, *(best or (x, x)), EPS,
        )  # fmt: skip
        return grid[0]

    def total(self) -> Tensor:
        return self.x + self.update if self.product.update else self.x

    def before_epilogue(self, columns: int | None = None) -> Tensor:
        """Returns the product of the first columns in float64, of what the kernel rounds."""
        p, x = self.product, self.total().double()
        if p.norm == "rms":
            x = F.rms_norm(x, (p.n_in,), self.norm[0].double(), EPS)
        elif p.norm == "layer":
            x = F.layer_norm(x, (p.n_in,), *(one.double() for one in self.norm), EPS)
        x = x.to(self.dtype).double()[:, :columns]
        w = dequantize_weight(self.codes, torch.float64) if self.codes else self.weight.double()
        y = x @ w[:, :columns].mT
        return y + self.bias.double() if p.bias else y

    def expected(self, columns: int | None = None) -> Tensor:
        y, epilogue = self.before_epilogue(columns), self.product.epilogue
        if epilogue == "swiglu":
            gate, up = y.to(self.dtype).double().chunk(2, 1)
            return F.silu(gate) * up
        if epilogue == "gelu":
            return F.gelu(y, approximate="tanh")
        return F.silu(y) if epilogue == "silu" else y


# Rows, n_in, n_out, and more; the configuration.
CASES = {
    "bfloat16": (Product(3, 100, 70), WHOLE),
    "bfloat16, a residual sum": (Product(1, 1500, 20, update=True), PARTS),
    "RMSNorm, SwiGLU": (
        Product(3, 100, 108, update=True, norm="rms", epilogue="swiglu", half=54), WHOLE),
    "RMSNorm in parts": (
        Product(2, 1500, 20, update=True, norm="rms"), replace(PARTS, tiles=3)),
    "LayerNorm, GELU": (Product(5, 100, 40, bias=True, norm="layer", epilogue="gelu"), WHOLE),
    "LayerNorm in parts": (Product(16, 1500, 20, update=True, norm="layer"), PARTS),
    "8 bits, a scale for a row": (Product(2, 100, 40, 8, 100, zeros=True, bias=True), WHOLE),
    "8 bits in parts": (Product(4, 1500, 20, 8, 1500, norm="rms"), PARTS),
    "8 bits in groups, SwiGLU": (
        Product(3, 1504, 40, 8, 32, update=True, norm="rms", epilogue="swiglu", half=20), PARTS),
    "4 bits": (Product(1, 96, 70, 4, 32, norm="layer", bias=True), WHOLE),
    "4 bits in parts, GELU": (Product(9, 1536, 20, 4, 128, zeros=True, epilogue="gelu"), PARTS),
    "4 bits, a scale for a row": (Product(3, 1504, 20, 4, 1504, update=True), PARTS),
    "RMSNorm, SiLU, 11 rows in blocks": (
        Product(11, 100, 70, update=True, norm="rms", epilogue="silu"), EIGHT),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_results_are_float64s_but_for_a_rounding(name):
    product, config = CASES[name]
    for dtype in (torch.bfloat16, torch.float16)[: 2 if product.bits < 16 else 1]:
        given = Given(product, dtype)
        given.launch(config)
        expected, bound = given.expected(), torch.finfo(dtype).eps / 2
        assert relative_error(given.y[:-1], expected) < bound
        # Control: the last eight columns missing are beyond the bound.
        assert relative_error(given.expected(product.n_in - 8), expected) > bound
        assert (given.y[-1] == UNWRITTEN).all()
        wanted = given.total() if product.update else torch.full_like(given.x, UNWRITTEN)
        assert torch.equal(given.sum, wanted)


@pytest.mark.parametrize(
    "n_rows, config", [(3, WHOLE), (3, Config(16, 1, 1, 2048, 4)), (11, EIGHT)]
)
def test_the_best_outputs_of_programs_hold_the_first_of_the_largest(n_rows, config):
    given = Given(Product(n_rows, 96, 110, epilogue="best"))
    given.weight[105] = given.weight[31] = 9.0 * given.x[0]  # equal: the first counts
    given.weight[70] = 9.0 * given.x[1]
    given.weight[50, 0], given.x[:2, 0] = float("nan"), 0.0
    given.x[2, 0] = float("nan")

    def chosen() -> list[int]:
        best = torch.zeros(7, n_rows, dtype=torch.float32, device=DEVICE)
        ids = torch.zeros_like(best, dtype=torch.int32)
        n = given.launch(config, best, ids)
        largest = best[:n].amax(0)
        return ids[:n].where(best[:n] == largest, 999).amin(0).tolist()

    # 0 · NaN is NaN, and NaN is the largest. A row of NaN alone has the first of all.
    assert chosen()[:3] == [50, 50, 0]
    given.weight[50, 0], given.x[2, 0] = 0.0, 1.0
    expected = given.before_epilogue().argmax(1).tolist()
    assert expected[:2] == [31, 70] and chosen() == expected


@pytest.mark.parametrize("epilogue", ["heads", "rotated heads"])
@pytest.mark.parametrize("page, n_rows, config", [(0, 5, WHOLE), (4, 5, WHOLE), (0, 11, EIGHT)])
def test_heads_go_to_their_places_and_nowhere_else(page, n_rows, config, epilogue):
    n_heads, n_kv_heads, head_dim, capacity, n_pages = 3, 2, 16, 6, 6
    product = Product(
        n_rows, 64, (n_heads + 2 * n_kv_heads) * head_dim, epilogue=epilogue, half=head_dim // 2,
        n_heads=n_heads, n_kv_heads=n_kv_heads, page=page,
    )  # fmt: skip
    given = Given(product)
    # The second has no place, nor has the fourth. In pages the fifth has none either.
    lengths = [1, 0, 6, 7, 5, 2, 3, 4, 5, 6, 1][:n_rows]
    given.lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    table = torch.tensor([[3, -1], [-1, -1], [0, 1], [4, 5], [2, n_pages]], dtype=torch.int32)
    table = table.to(DEVICE)
    shape = n_rows if page == 0 else n_pages, n_kv_heads, page or capacity, head_dim
    keys, values = (
        torch.full(shape, UNWRITTEN, dtype=given.dtype, device=DEVICE) for _ in range(2)
    )
    if page:  # whose heads lie behind their token, as `PagedCache` has them
        keys, values = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values))
    places = given.lengths.long() - 1
    angles = torch.rand(capacity, head_dim // 2, generator=given.generator).to(DEVICE)
    given.tables, given.places = (angles.cos(), angles.sin()), (keys, values, table)
    given.y = torch.full((n_rows + 1, n_heads * head_dim), UNWRITTEN, dtype=given.dtype)
    given.y = given.y.to(DEVICE)
    integers = *keys.stride()[:3], capacity, 2 if page else 0, n_pages if page else 0
    given.launch(config, integers=integers)

    y = given.before_epilogue().view(n_rows, -1, head_dim)
    q, k, v = y.split((n_heads, n_kv_heads, n_kv_heads), 1)
    inside = [b for b in range(n_rows) if 0 <= places[b] < capacity]
    if epilogue == "rotated heads":
        q, k = q.clone(), k.clone()
        for b in inside:
            cos, sin = (one[places[b]].double() for one in given.tables)
            for heads in (q, k):
                one, two = heads[b].chunk(2, 1)
                heads[b] = torch.cat((one * cos - two * sin, two * cos + one * sin), 1)
    bound = torch.finfo(given.dtype).eps / 2
    assert relative_error(given.y[:-1], q.flatten(1)) < bound and (given.y[-1] == UNWRITTEN).all()
    for memory, wanted in ((keys, k), (values, v)):
        for b in inside:
            row, slot = b, places[b].item()
            if page:
                row, slot = table[b, slot // page].item(), slot % page
                if not 0 <= row < n_pages:
                    continue
            assert relative_error(memory[row, :, slot], wanted[b]) < bound
            memory[row, :, slot] = UNWRITTEN
        assert (memory == UNWRITTEN).all()


@pytest.mark.parametrize(
    "n_rows, n_in, n_out, rows, n_blocks",
    [(8, 512, 1536, 8, 1), (9, 512, 1536, 8, 2), (16, 2048, 512, 8, 2), (9, 2048, 16384, 16, 1)],
)
def test_more_than_eight_rows_of_a_small_weight_are_two_programs_work(
    n_rows, n_in, n_out, rows, n_blocks
):
    product, target = Product(n_rows, n_in, n_out), devices.named("H200")
    config = config_of(product, target)
    (_, found), _ = launch_of(product, config, target, constant=False)
    assert (config.rows, found) == (rows, n_blocks)
