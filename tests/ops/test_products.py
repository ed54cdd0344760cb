"""Tests products and what is fused into them: paths, dtypes, gradients."""

import pytest
import torch
import torch.nn.functional as F

from tnp.dispatch import devices
from tnp.dispatch.plans import build
from tnp.dispatch.spec import Budget, Call, Case
from tnp.gates.checks import error_ratio
from tnp.ops._shared.random_values import Random
from tnp.ops._shared.triton_matmul import MatmulConfig
from tnp.ops.products import GELU_LINEAR, MATMUL, OPERATORS, gelu_linear, matmul, triton_product
from tnp.ops.products.triton_product import DEEP, Operand

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CALLS = {"matmul": (matmul, "triton"), "gelu_linear": (gelu_linear, "fused")}
SMALL = [
    pytest.param(operator, case, id=str(case))
    for operator in OPERATORS
    for case in operator.cases(devices.INTERPRETER)
    if case.problem.dtype != "float16"
]


@pytest.fixture(autouse=True)
def _uninitialized_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def values(operator, case, dtype=None) -> list[torch.Tensor]:
    """Returns inputs that ask for gradients."""
    drawn = operator.draw(case, Random(case, DEVICE)).values()
    return [(x if dtype is None else x.to(dtype)).detach().requires_grad_() for x in drawn]


def results(compute, inputs, dy) -> list[torch.Tensor]:
    """Returns the output and all gradients."""
    y = compute(*inputs)
    return [y, *torch.autograd.grad(y, inputs, dy.to(y.dtype))]


def off(operator, case, compute) -> float:
    """Returns the largest error of output and gradients, as a share of its budget."""
    inputs, exact = values(operator, case), values(operator, case, torch.float64)
    shape = operator.reference(*exact).shape
    dy = Random(case, DEVICE, seed=1)(*shape)
    every = zip(
        results(compute, inputs, dy),
        results(operator.reference, inputs, dy),
        results(operator.reference, exact, dy),
        [Budget.outputs] + [Budget.gradients] * len(inputs),
        strict=True,
    )
    return max(error_ratio(x, theirs, truth) / budget for x, theirs, truth, budget in every)


def ours(operator):
    function, name = CALLS[operator.name]
    return lambda *inputs: function(*inputs, implementation=name)


@pytest.mark.parametrize("sizes", [(24, 16, 40), (23, 17, 41)], ids=["TMA", "pointers"])
@pytest.mark.parametrize("columns", ["", "a", "b", "ab"])
def test_either_operand_may_be_transposed(sizes, columns):
    problem = MATMUL.problem("bfloat16", **dict(zip("mnk", sizes, strict=True)))
    case = Case(problem, (("transposed", columns),) if columns else ())
    assert all(Operand.of(x.detach()).mappable == (sizes[0] == 24) for x in values(MATMUL, case))
    assert off(MATMUL, case, ours(MATMUL)) <= 1


def test_default_tiles_fill_a_gpu_and_fit_its_shared_memory():
    for model in ("H200", "A100", "RTX 4090", "T4"):
        target = devices.named(model)
        for m in (1, 100, 1024, 8192):
            problem = MATMUL.problem("bfloat16", m=m, n=3072, k=768)
            first, *rest = triton_product.configs(Call(problem, target))
            for config in (first, *rest):
                in_flight = (config.block_m + config.block_n) * config.block_k * config.num_stages
                assert 2 * in_flight <= target.shared_bytes
            assert first.block_m < 2 * max(m, 9)
    large = triton_product.configs(Call(problem, devices.named("H200")))[0]
    assert (large.block_m, large.block_n) == (128, 128)


@pytest.mark.parametrize("dtype, m, n, tile", [
    ("float32", 128, 4096, (64, 64)), ("float32", 128, 2048, (64, 64)),
    ("float32", 128, 1024, (16, 64)),  # 64 rows would leave three quarters of an H200 idle
    ("float32", 40, 4096, (16, 64)),
    # Deep tiles: the one that loads least.
    ("float16", 128, 1024, (64, 32)), ("float16", 128, 4096, (64, 64)),
    ("float16", 128, 8192, (64, 128)), ("float16", 128, 11008, (128, 128)),
    ("float16", 40, 11008, (64, 128)),  # the tile of 128 rows is too high
    ("float16", 129, 4096, (64, 64)), ("float16", 32, 4096, (16, 64)),
    ("float16", 100, 1001, (16, 64)),  # TMA cannot read such rows
])  # fmt: skip
def test_the_default_tile_by_rows_and_columns(dtype, m, n, tile):
    call = Call(MATMUL.problem(dtype, m=m, n=n, k=1024), devices.named("H200"))
    first = triton_product.configs(call)[0]
    assert (first.block_m, first.block_n) == tile
    is_deep = dtype == "float16" and 32 < m <= 128 and n % 8 == 0
    assert (first in DEEP) == is_deep
    elsewhere = Call(call.problem, devices.named("A100"))
    assert not set(DEEP) & set(triton_product.configs(elsewhere))


def test_each_gradient_of_few_rows_has_tiles_of_its_own(monkeypatch):
    """da is [128, k], and db is [k, n] of inner size 128."""
    call = Call(
        MATMUL.problem("float16", m=128, n=11008, k=4096), devices.named("H200"), ("a", "b")
    )
    dc, a, b = (
        torch.empty(size, device="meta") for size in ((128, 11008), (128, 4096), (4096, 11008))
    )
    tiles = {}

    def multiply(call, a, b, config):
        tiles[a.shape[0]] = config.block_m, config.block_n

    monkeypatch.setattr(triton_product, "_multiply", multiply)
    for config in triton_product.configs_backward(call)[0], MatmulConfig(64, 128, 64, 8, 4):
        triton_product.prepare_backward(call, config, ((dc,), (a, b), ()))
        own = (64, 64), (128, 128)
        assert (tiles[128], tiles[4096]) == (own if config in DEEP else ((64, 128), (64, 128)))


def test_nothing_is_saved_without_a_gradient():
    inputs = tuple(
        values(GELU_LINEAR, Case(GELU_LINEAR.problem("float32", rows=3, n_in=4, n_out=5)))
    )
    with torch.no_grad():
        assert build(GELU_LINEAR, "fused", inputs).forward(inputs, ())[1] == ()
    _, (z,) = build(GELU_LINEAR, "fused", inputs, wanted=("bias",)).forward(inputs, ())
    torch.testing.assert_close(z, F.linear(*inputs))


def test_float32_tells_the_tanh_form_from_that_with_erf():
    case = Case(GELU_LINEAR.problem("float32", rows=20, n_in=30, n_out=40))
    assert off(GELU_LINEAR, case, lambda x, weight, bias: F.gelu(F.linear(x, weight, bias))) > 1
