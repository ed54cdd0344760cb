"""What the kernels for few keys alone do: every configuration, segments, what they refuse."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from tests.ops.test_attention_kernels import (
    BUDGETS,
    DEVICE,
    KERNELS,
    SCALE,
    counts,
    draw,
    ratios,
    reference,
)
from tnp.gates import rounding
from tnp.gates.attention_cases import Case
from tnp.gates.checks import OUTPUT_BUDGET, distance, error_ratio, max_abs_error
from tnp.ops.attention import few_keys
from tnp.ops.attention.few_keys import ForwardConfig
from tnp.ops.attention.kernels import Problem
from tnp.ops.attention.primitives import LOG2_E, LaunchConfig

SMALL = Problem("fused", torch.bfloat16, 64, 8, 564, 64, 64, 90)
FORWARD = sorted(
    {c for n_k in (64, 128) for c in few_keys.forward_configs(replace(SMALL, n_k=n_k))}, key=str
)
BACKWARD = sorted(
    {
        config
        for n_k in (64, 128)
        for capability in (80, 90)
        for config in few_keys.backward_configs(replace(SMALL, n_k=n_k, capability=capability))
    },
    key=str,
)


def backward(inputs, config: LaunchConfig, n_context=None) -> tuple[torch.Tensor, ...]:
    """o, dq, dk, dv, the forward pass by its default."""
    q, k, v, do = inputs
    default = few_keys.forward_configs(Problem.of("forward", q, k))[0]
    o, lse = few_keys.forward(q, k, v, n_context, SCALE, default)
    return o, *few_keys.backward(do, q, k, v, o, lse, n_context, SCALE, config)


@pytest.mark.parametrize("n_q", [1, 63, 64, 65, 127])
@pytest.mark.parametrize("n_k", [64, 128])
def test_sizes(n_q, n_k):
    inputs = draw(Case(2, 3, n_q, n_k))
    outs = KERNELS["few_keys"].run(*inputs, counts(n_k, 3))
    for name, ratio in ratios(outs, inputs, counts(n_k, 3)).items():
        assert ratio <= BUDGETS[name], name


@pytest.mark.parametrize("config", FORWARD, ids=str)
def test_forward_configurations_are_within_budgets(config: ForwardConfig):
    q, k, v, do = draw(Case(2, 1, 333, config.block_n - 3))
    n_context = counts(50, 7)
    o, lse = few_keys.forward(q, k, v, n_context, SCALE, config)
    own, exact = (reference(q, k, v, do, n_context, dtype)[0] for dtype in (q.dtype, torch.float64))
    floors = rounding.attention(q, k, v, do, SCALE, n_context.tolist())
    assert error_ratio(o, own, exact, floors["o"]) <= BUDGETS["o"]
    scores = SCALE * q.double() @ k.double().mT
    for b, n_keys in enumerate(n_context.tolist()):
        scores[b, :, :, n_keys:] = float("-inf")
    assert distance(lse / LOG2_E, scores.logsumexp(-1)) <= OUTPUT_BUDGET * floors["lse"]


@pytest.mark.parametrize("config", BACKWARD, ids=str)
def test_backward_configurations_are_within_budgets(config: LaunchConfig):
    inputs, n_context = draw(Case(2, 1, 150, config.block_n - 3)), counts(50, 7)
    outs = backward(inputs, config, n_context)
    for name, ratio in ratios(outs, inputs, n_context).items():
        assert ratio <= BUDGETS[name], name


@pytest.fixture
def launches(monkeypatch) -> list[int]:
    """How many segments each reduction added up."""
    reduced, sum_partials = [], few_keys.sum_partials

    def counted(partials, dk, dv):
        reduced.append(len(partials))
        sum_partials(partials, dk, dv)

    monkeypatch.setattr(few_keys, "sum_partials", counted)
    return reduced


def test_segments_add_up_to_the_single_launch(launches, monkeypatch):
    """Five tiles in segments of two: the last is short."""
    inputs, n_context = draw(Case(2, 2, 290, 40, dtype=torch.float32)), counts(40, 9)
    config = LaunchConfig(64, 64, 4, 1)
    split, again = (backward(inputs, config, n_context) for _ in range(2))
    assert launches == [2, 2]
    assert all(map(torch.equal, split, again))
    monkeypatch.setattr(few_keys, "FULL_GRID", 1)
    whole = backward(inputs, config, n_context)
    assert launches == [2, 2]
    for a, b in zip(split, whole, strict=True):
        assert max_abs_error(a, b) <= 1e-5 and a.stride() == b.stride()


def test_one_launch_where_the_heads_fill_the_gpu(launches, monkeypatch):
    monkeypatch.setattr(few_keys, "FULL_GRID", 4)
    backward(draw(Case(2, 2, 290, 40)), LaunchConfig(64, 64, 4, 1))
    assert launches == []


def test_the_backward_pass_does_not_read_o():
    q, k, v, do = draw(Case(1, 2, 70, 40))
    config = few_keys.backward_configs(Problem.of("fused", q, k))[0]
    o, lse = few_keys.forward(q, k, v, None, SCALE, ForwardConfig(64, 64, 1, 4, 1))
    unread = torch.full_like(o, float("nan"))
    first, again = (
        few_keys.backward(do, q, k, v, x, lse, None, SCALE, config) for x in (o, unread)
    )
    assert all(map(torch.equal, first, again))


def test_an_lse_off_by_a_rounding_does_not_unbalance_a_row():
    """Σ_j ds_j = 0 whatever the scale of p: keys that are all equal leave no gradient to q."""
    q, k, v, do = draw(Case(1, 2, 70, 40, dtype=torch.float32))
    k = k[:, :, :1].expand_as(k)
    o, lse = few_keys.forward(q, k, v, None, SCALE, ForwardConfig(16, 64, 1, 8, 1))
    config = LaunchConfig(16, 64, 8, 1)
    dq, _, _ = few_keys.backward(do, q, k, v, o, lse + 0.01, None, SCALE, config)
    assert dq.abs().max() <= 1e-4


@pytest.mark.blas
def test_a_gradient_of_expanded_rows():
    q, k, v, _ = draw(Case(1, 2, 70, 40, dtype=torch.float32))
    do = torch.randn(64, device=DEVICE).expand_as(q)
    outs = backward((q, k, v, do), LaunchConfig(64, 64, 4, 1))
    for name, ratio in ratios(outs, (q, k, v, do)).items():
        assert ratio <= BUDGETS[name], name


def test_what_they_refuse():
    assert few_keys.unsupported(SMALL) is None
    assert few_keys.unsupported(replace(SMALL, n_k=128, operation="forward")) is None
    refused = few_keys.unsupported(replace(SMALL, n_k=129))
    assert refused == "its tile holds 128 keys and there are 129"
    refused = few_keys.unsupported(replace(SMALL, dtype=torch.float32, head_dim=128))
    assert refused == "no tile of 64 keys at head_dim 128 fits the registers"


def test_configurations_survive_json():
    for config in (*FORWARD, *BACKWARD):
        assert type(config)(**json.loads(json.dumps(asdict(config)))) == config
