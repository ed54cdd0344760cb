"""Tests what runs around the kernel for Hopper that multiplies by codes, which kernel serves how
many rows, and the weight for many rows. The gate runs the kernel on a GPU.
"""

from dataclasses import replace

import pytest
import torch

from tests.ops.problems import DEVICE
from tnp.dispatch import devices
from tnp.dispatch.selection import kernels_of
from tnp.dispatch.spec import Call
from tnp.ops.quantized_linear import OPERATOR, hopper_tiles, quantized_linear, triton_weight
from tnp.ops.quantized_linear.quantizer import quantize_weight

KERNELS = kernels_of(next(one for one in OPERATOR.implementations if one.name == "triton").forward)


def call(rows: int, n_in: int = 4096, n_out: int = 4096, gpu: str = "H200", **given) -> Call:
    given = {"group": 32, "bits": 4} | given
    problem = OPERATOR.problem("bfloat16", rows=rows, n_in=n_in, n_out=n_out, **given)
    return Call(problem, devices.named(gpu))


def chosen(what: Call) -> str:
    return next(name for name, kernel in KERNELS.items() if kernel.refuses(what) is None)


@pytest.mark.parametrize(
    "rows, on_hopper, on_ampere",
    [
        (16, "few_rows", "few_rows"), (17, "hopper_tiles", "tiles"),
        (1023, "hopper_tiles", "tiles"), (1024, "weight", "weight"),
    ],
)  # fmt: skip
def test_which_kernel_serves_how_many_rows(rows, on_hopper, on_ampere):
    assert chosen(call(rows)) == on_hopper
    assert chosen(call(rows, gpu="A100")) == on_ampere


def test_rows_that_tma_cannot_read_are_left_to_portable_tiles():
    refuses = hopper_tiles.FORWARD.refuses
    ragged = {"n_in": 2056, "group": 2056}
    assert refuses(call(40, **ragged)) == "it takes n_in that 32 divides with bits=4, not 2056"
    assert refuses(call(40, bits=8, **ragged)).startswith("it takes n_in that 16 divides")
    assert refuses(call(40, n_in=2064, group=2064, bits=8)) is None
    for gpu in ("A100", "B200"):
        assert refuses(call(40, gpu=gpu)) == "it is written for compute capability 9.0"
    assert chosen(call(40, **ragged)) == chosen(call(2048, **ragged)) == "tiles"
    reasons = triton_weight.FORWARD.refuses
    assert reasons(call(40)) == "it takes at least 1,024 rows, not 40"
    assert reasons(call(2048, **ragged)) == "it takes groups that 32 divides, not 2056"


@pytest.mark.parametrize("rows", [20, 100, 777])
@pytest.mark.parametrize("n_in, n_out", [(96, 9), (2048, 2048), (4096, 28672), (8192, 1000)])
def test_every_step_is_taken_once_and_every_part_is_found(n_in, n_out, rows):
    """Both launches compute places as is done here."""
    what = call(rows, n_in, n_out)
    (config,) = hopper_tiles.configs(what)
    n_steps, n_row_tiles, n_tiles, each, programs = hopper_tiles.shares(what, config)
    assert programs <= what.target.multiprocessors
    assert n_tiles == n_row_tiles * -(-n_out // config.outputs) >= n_row_tiles
    written: dict[int, list[int]] = {tile: [] for tile in range(n_tiles)}
    taken = 0
    for program in range(programs):
        begin = at = program * each
        end = min(begin + each, n_tiles * n_steps)
        assert begin < end
        while at < end:
            tile, first = divmod(at, n_steps)
            n = min(n_steps - first, end - at)
            if n < n_steps:
                written[tile].append(program * 2 + (at > begin))
            at, taken = at + n, taken + n
    assert taken == n_tiles * n_steps
    slots = [slot for some in written.values() for slot in some]
    assert len(slots) == len(set(slots)) and (each % n_steps > 0 or not slots)
    for tile, some in written.items():
        first, last = tile * n_steps // each, ((tile + 1) * n_steps - 1) // each
        if first < last:
            begins_before = first * each < tile * n_steps
            assert some == [2 * first + begins_before, *range(2 * first + 2, 2 * last + 2, 2)]
        else:
            assert not some


def parts_of(sums: torch.Tensor, config: hopper_tiles.Config, shared: tuple) -> torch.Tensor:
    """Returns the parts of sums [steps, rows, outputs], as programs leave them; others are NaN."""
    n_steps, n_row_tiles, n_tiles, each, programs = shared
    parts = torch.full((programs, 2, config.outputs * config.rows), torch.nan)
    for at in range(n_tiles * n_steps):
        tile, step = divmod(at, n_steps)
        program = at // each
        begin = max(program * each, tile * n_steps)
        if at > begin:
            continue
        end = min((program + 1) * each, (tile + 1) * n_steps)
        row, output = tile % n_row_tiles * config.rows, tile // n_row_tiles * config.outputs
        some = sums[step : step + end - begin].sum(0)
        some = some[row : row + config.rows, output : output + config.outputs].T
        # Warpgroups, warps, halves, lanes; eight rows, lanes, pairs
        some = some.reshape(2, 4, 2, 8, config.rows // 8, 4, 2).permute(0, 4, 1, 3, 5, 2, 6)
        parts[program, int(begin > program * each)] = some.flatten()
    return parts


@pytest.mark.parametrize(
    "rows, n_in, n_out", [(20, 2048, 300), (61, 1664, 512), (130, 1024, 256), (100, 4224, 128)]
)
def test_parts_are_added_where_tiles_have_several(rows, n_in, n_out):
    what = call(rows, n_in, n_out, gpu="A100", bias=True)
    what = replace(what, target=replace(what.target, multiprocessors=11))
    (config,) = hopper_tiles.configs(what)
    shared = n_steps, n_row_tiles, n_tiles, each, _ = hopper_tiles.shares(what, config)
    assert each % n_steps
    in_tiles = n_row_tiles * config.rows, n_tiles // n_row_tiles * config.outputs
    random = torch.Generator().manual_seed(0)
    sums = torch.randn(n_steps, *in_tiles, generator=random)
    bias = torch.randn(n_out, generator=random).to(torch.bfloat16)
    parts = parts_of(sums, config, shared).to(DEVICE)
    y = torch.full((rows, n_out), 7.0, dtype=torch.bfloat16, device=DEVICE)
    hopper_tiles.adding(what, config)(parts, bias.to(DEVICE), y)
    right = sums.double().sum(0)[:rows, :n_out] + bias.double()
    for tile in range(n_tiles):
        row, output = tile % n_row_tiles * config.rows, tile // n_row_tiles * config.outputs
        at = slice(row, row + config.rows), slice(output, output + config.outputs)
        if tile * n_steps // each == ((tile + 1) * n_steps - 1) // each:
            assert (y[at] == 7).all()  # the tile's only program has written it
        else:
            assert torch.allclose(y[at].cpu().double(), right[at], rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("n_in, group", [(96, 32), (192, 64), (256, 128), (160, None)])
def test_the_weight_of_many_rows_is_the_one_of_torch(n_in, group, bits):
    random = torch.Generator().manual_seed(0)
    w = torch.randn(9, n_in, generator=random)
    x = torch.randn(1024, n_in, generator=random)
    for dtype, symmetric in ((torch.bfloat16, True), (torch.float16, False)):
        q = quantize_weight(w, bits, group, symmetric, dtype)
        given = x.to(DEVICE, dtype), q.weight.to(DEVICE), q.scales.to(DEVICE)
        given = *given, None if symmetric else q.zeros.to(DEVICE), torch.ones(9, device=DEVICE)
        y = quantized_linear(*given, implementation="triton")
        assert torch.equal(y, quantized_linear(*given))
