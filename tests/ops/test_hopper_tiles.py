"""Tests what runs around the kernel for Hopper that multiplies by codes, which kernel serves how
many rows, and the weight for many rows. The gate runs the kernel on a GPU.
"""

from types import SimpleNamespace

import pytest
import torch

from tests.ops.problems import DEVICE
from tnp.dispatch import devices
from tnp.dispatch.selection import kernels_of
from tnp.dispatch.spec import Call
from tnp.ops._shared import counters
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
    """Programs and the last one of each tile compute places as the kernel does."""
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


class OnGpu:
    """Stands for a tensor on a GPU."""

    is_cuda = True

    def get_device(self) -> int:
        return 0

    def new_zeros(self, n: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(n, dtype=dtype)


def test_launches_that_may_run_at_once_share_no_counters(monkeypatch):
    now = SimpleNamespace(stream=1, captures=True)
    active = SimpleNamespace(get_current_stream=lambda device: now.stream)
    reserve = torch.zeros(4 * counters.OF_STREAM, dtype=torch.int32)
    monkeypatch.setattr(counters, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(counters, "_reserve", lambda device: reserve)
    monkeypatch.setattr(counters, "_left", {})
    monkeypatch.setattr(counters, "_of_streams", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.captures)

    def span(n: int) -> tuple[int, int]:
        found = counters.zeros_for(OnGpu(), n)
        assert len(found) >= n and found.dtype == torch.int32 and not found.any()
        return found.data_ptr(), found.data_ptr() + 4 * len(found)

    inside = reserve.data_ptr(), reserve.data_ptr() + 4 * len(reserve)
    first = span(10)  # captured before there is a reserve
    assert not inside[0] <= first[0] < inside[1]
    now.captures = False
    of_one = span(10)
    assert span(20) == of_one
    now.stream = 2
    of_two = span(10)
    now.captures = True
    spans = sorted([of_one, of_two, *(span(10) for _ in range(3))])
    assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
    assert all(inside[0] <= one[0] and one[1] <= inside[1] for one in spans)
    assert all((one[0] - inside[0]) % 128 == 0 for one in spans)
    spent = span(4 * counters.OF_STREAM)
    assert not inside[0] <= spent[0] < inside[1]


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
