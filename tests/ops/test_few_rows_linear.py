"""The kernel of linear layers of a few rows: where it is taken, and what it reads.

The gate compares it with float64 (`tests.gates.test_operators`).
"""

import torch

from tests.ops.launched import reads, recorded
from tests.ops.problems import DEVICE
from tnp.ops.projection import linear


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def test_few_rows_are_read_where_they_lie():
    x, weight = draw(3, 5, 64, dtype=torch.bfloat16), draw(8, 64)
    for view in (x[:, 1:], x.transpose(0, 1), x[..., 16:48], x[0, 0]):
        w = weight[:, : view.shape[-1]]
        with recorded() as launches:
            y = linear(view, w, implementation="fused")
        assert len(launches) == 1 and reads(launches[0], view)
        torch.testing.assert_close(y, linear(view, w))
    columns = x.transpose(1, 2)  # rows of which are not contiguous
    torch.testing.assert_close(
        linear(columns, weight[:, :5], implementation="fused"), linear(columns, weight[:, :5])
    )
