"""The kernel of linear layers of a few rows: where it is taken, and what it reads.

The gate compares it with float64 (`tests.gates.test_operators`).
"""

import pytest
import torch

from tests.ops.launched import reads, recorded
from tests.ops.problems import DEVICE
from tnp.dispatch import plans
from tnp.ops.projection import OPERATOR_LINEAR, linear


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


@pytest.mark.parametrize(
    "rows, n_in, dtype, kernel",
    [
        (1, 512, torch.bfloat16, "few_rows"),
        (16, 2048, torch.float16, "few_rows"),
        (17, 512, torch.bfloat16, "cublas"),
        (2, 2049, torch.bfloat16, "cublas"),
        (2, 512, torch.float32, "cublas"),
    ],
)
@pytest.mark.parametrize("wanted", [(), ("x", "weight")])
def test_few_rows_have_a_kernel_of_their_own(rows, n_in, dtype, kernel, wanted):
    inputs = draw(rows, n_in, dtype=dtype), draw(3, n_in)
    plan = plans.build(OPERATOR_LINEAR, "fused", inputs, (), wanted)
    expected = kernel if plan.what.target.kind != "cpu" else "cublas"
    assert plan.choices["linear.forward"]["choice"] == expected


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
