"""Tests what torchao is given and returns, with a stand-in for it, and with it where installed.

The stand-in has the arguments and results of torchao 0.17.0.
"""

import importlib.util
import sys
import types

import pytest
import torch

from tnp.dispatch.devices import CPU, named
from tnp.dispatch.spec import Call
from tnp.ops.mlp import OPERATOR, reference
from tnp_peers import torchao as peers

MLP = peers.MLP
# Taken here: the stand-in stands in its place in the tests that use it.
INSTALLED = importlib.util.find_spec("torchao") is not None


class Config:
    """Stands for Float8LinearConfig, whose recipe's name alone is asked."""

    @classmethod
    def from_recipe_name(cls, name):
        assert name == "rowwise_with_gw_hp"
        return cls()


class Float8Linear(torch.nn.Linear):
    @classmethod
    def from_float(cls, mod, config=None):
        assert mod.bias is None
        layer = cls(mod.in_features, mod.out_features, bias=False)
        layer.config, layer.linear_mm_config = config, "products"
        return layer


class Matmul(torch.autograd.Function):
    """Multiplies x @ weight_t, and gives its gradients."""

    @staticmethod
    def forward(ctx, input_hp, weight_hp_t, linear_mm_config, config):
        assert linear_mm_config == "products" and isinstance(config, Config)
        assert input_hp.dtype == weight_hp_t.dtype
        ctx.save_for_backward(input_hp, weight_hp_t)
        return input_hp @ weight_hp_t

    @staticmethod
    def backward(ctx, gradient):
        x, w_t = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        return gradient @ w_t.t(), (flat.t() @ x.reshape(-1, x.shape[-1])).t(), None, None


@pytest.fixture(autouse=True)
def forgotten():
    peers._layer.cache_clear()
    yield
    peers._layer.cache_clear()


@pytest.fixture
def stand_in(monkeypatch):
    modules = {
        "torchao": {},
        "torchao.float8": {"Float8LinearConfig": Config},
        "torchao.float8.float8_linear": {
            "Float8Linear": Float8Linear, "matmul_with_hp_or_float8_args": Matmul,
        },
    }  # fmt: skip
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


def results(run, dtype):
    """Returns y and the gradients of x, up and down."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 40, 64), (96, 64), (64, 96), (2, 40, 64)
    x, up, down, dy = (torch.randn(shape, generator=generator) for shape in shapes)
    x, dy = x.to(dtype), dy.to(dtype)
    leaves = [x.requires_grad_(), (up / 8).requires_grad_(), (down / 10).requires_grad_()]
    y = run(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def test_weights_are_cast_and_their_gradients_are_float32(stand_in):
    found, expected = results(MLP.run, torch.bfloat16), results(reference, torch.bfloat16)
    assert [x.dtype for x in found] == [torch.bfloat16] * 2 + [torch.float32] * 2
    for one, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(one, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(not INSTALLED, reason="torchao is not installed")
def test_the_package_rounds_to_8_bits_and_no_further():
    found, expected = results(MLP.run, torch.bfloat16), results(reference, torch.bfloat16)
    for one, wanted in zip(found, expected, strict=True):
        error = (one.double() - wanted.double()).norm() / wanted.double().norm()
        assert 0.02 < error < 0.08


def call(dtype="bfloat16", d_ff=1408, gpu="H200") -> Call:
    problem = OPERATOR.problem(dtype, rows=100, d_model=512, d_ff=d_ff)
    return Call(problem, named(gpu) if gpu else CPU, ("x", "up", "down"))


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"gpu": "A100"}, "compute capability 8.9 or newer"),
        ({"gpu": None}, "needs a CUDA device"),
        ({"dtype": "float16"}, "it takes bfloat16, not float16"),
        ({"d_ff": 1365}, "it takes multiples of 16 for d_ff, not 1365"),
    ],
)
def test_limits_are_the_packages(asked, reason):
    assert MLP.refuses(call()) is None
    assert reason in MLP.refuses(call(**asked))


def test_it_is_chosen_by_its_name_alone():
    assert not MLP.chosen_from and not MLP.selectable


def test_half_of_the_backward_pass_is_in_16_bits():
    case = OPERATOR.case("bfloat16", 100, 512, 1408)
    assert set(MLP.work(case, "forward").flops) == {"e4m3"}
    backward = MLP.work(case, "backward").flops
    assert backward["e4m3"] == backward["bfloat16"]
