"""Every kernel, called directly: n_keys, extreme scores, controls where the floor is the budget.

On the CPU the portable ones are interpreted, and those for Hopper skipped.
"""

import gc
import json
import weakref
from dataclasses import dataclass, replace

import pytest
import torch

from tests.dtypes import FLOAT32
from tests.ops.problems import DEVICE
from tnp.dispatch import devices, plans, selection, tuned_tables
from tnp.dispatch.spec import Budget, Call
from tnp.dispatch.spec import Case as OperatorsCase
from tnp.gates.checks import distance, error_ratio, max_abs_error
from tnp.ops._shared import rounding_error
from tnp.ops._shared.random_values import Random
from tnp.ops.attention import FORWARD, FUSED, OPERATOR, SEPARATE, triton_backward
from tnp.ops.attention.primitives import LOG2_E
from tnp.ops.attention.torch_forms import reference as formula
from tnp.ops.attention.torch_forms import visible

SCALE = 0.125
BUDGETS = {"o": Budget.outputs} | dict.fromkeys(("dq", "dk", "dv"), Budget.gradients)


@dataclass(frozen=True)
class Case:
    """Sizes, dtype, and the factor that q and k are scaled up by."""

    batch: int
    n_heads: int
    n_q: int
    n_k: int
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    magnitude: float = 1.0


# 16 bits on a GPU, so that all kernels serve it.
BATCH = Case(3, 1, 67, 60, dtype=torch.bfloat16 if DEVICE.type == "cuda" else torch.float32)
COUNTS = [1, 60, 40]


SIZES = {"batch": 4, "n_heads": 8, "n_q": 564, "n_k": 64, "head_dim": 64}
# An H200's multiprocessors: what decides whether queries are split into segments.
TARGET = replace(devices.of_device(DEVICE), multiprocessors=132)


@dataclass(frozen=True)
class Kernels:
    """A forward and a backward kernel, launched by plans, with their default configurations."""

    forward: str
    backward: str
    implementation: str

    def run(self, q, k, v, do, n_keys=None, config=None) -> tuple[torch.Tensor, ...]:
        """o, dq, dk, dv; skips the test where the kernels do not serve the problem."""
        plan, inputs = self.plan(q, k, v, n_keys, config=config)
        (o,), saved = plan.forward(inputs, (SCALE,))
        return o, *plan.backward((do,), tuple(plan.kept(inputs, (o,))), saved, (SCALE,))

    def lse(self, q, k, v, n_keys=None, config=None) -> torch.Tensor:
        """Of the rows, to base 2."""
        plan, inputs = self.plan(q, k, v, n_keys, forward_config=config)
        return plan.forward(inputs, (SCALE,))[1][0]

    def plan(self, q, k, v, n_keys=None, wanted=("q", "k", "v"), config=None, forward_config=None):
        """With these kernels forced, of `config` backward; and the inputs as it takes them."""
        inputs = (q, k, v, n_keys, None, None)
        what = selection.describe(OPERATOR, inputs, (), wanted, TARGET)
        backward = SEPARATE if self.implementation == "separate" else FUSED
        forced = {}
        for operation, name, given in (
            (FORWARD, self.forward, forward_config),
            (backward, self.backward, config),
        ):
            kernel = selection.kernels_of(operation)[name]
            if reason := kernel.refuses(what):
                pytest.skip(reason)
            forced[operation.name] = name, given or kernel.configs(what)[0]
        arguments = OPERATOR, self.implementation, inputs, (), wanted, TARGET, forced
        return plans.build(*arguments), inputs


KERNELS = {
    "separate": Kernels("triton", "triton", "separate"),
    "fused": Kernels("triton", "triton", "fused"),
    "few_keys": Kernels("few_keys", "few_keys", "fused"),
    "hopper separate": Kernels("hopper", "hopper", "separate"),
    "hopper fused": Kernels("hopper", "hopper", "fused"),
}


@pytest.fixture(params=KERNELS)
def kernels(request) -> Kernels:
    return KERNELS[request.param]


def draw(case: Case) -> list[torch.Tensor]:
    """q, k, v, views of one projection, and do."""
    sizes = {name: getattr(case, name) for name in OPERATOR.sizes}
    problem = OPERATOR.problem(str(case.dtype).removeprefix("torch."), **sizes)
    of = OperatorsCase(problem, (("magnitude", case.magnitude),))
    random = Random(of, DEVICE)
    inputs = [x for x in OPERATOR.draw(of, random).values() if x is not None]
    do = random(case.batch, case.n_q, case.n_heads, case.head_dim)
    return [*inputs, do.transpose(1, 2)]


def counts(*n_keys: int) -> torch.Tensor:
    return torch.tensor(n_keys, dtype=torch.int32, device=DEVICE)


def reference(q, k, v, do, n_keys=None, dtype=torch.float64) -> list[torch.Tensor]:
    """o, dq, dk, dv in `dtype`, each sample with its own keys alone."""
    samples = []
    for b, length in enumerate([k.shape[2]] * len(q) if n_keys is None else n_keys.tolist()):
        inputs = [x[b : b + 1].to(dtype).requires_grad_() for x in (q, k, v)]
        keys = (x[:, :, :length] for x in inputs[1:])
        o = formula(inputs[0], *keys, None, None, None, SCALE)
        samples.append((o.detach(), *torch.autograd.grad(o, inputs, do[b : b + 1].to(dtype))))
    return [torch.cat(heads) for heads in zip(*samples, strict=True)]


def seen(q, k, n_keys=None) -> torch.Tensor | None:
    """Which keys the queries of each sample see."""
    return visible(q, k, n_keys, None, None)


def ratios(outs, inputs, n_keys=None) -> dict[str, float]:
    own = reference(*inputs, n_keys, dtype=inputs[0].dtype)
    exact = reference(*inputs, n_keys)
    floors = rounding_error.attention(*inputs, SCALE, seen(*inputs[:2], n_keys))
    results = zip(BUDGETS, outs, own, exact, strict=True)
    return {name: error_ratio(*tensors, floors[name]) for name, *tensors in results}


@pytest.mark.parametrize("n_keys", [None, [1, 1]])
def test_one_key_is_its_value_and_has_no_gradient_to_q_and_k(kernels, n_keys):
    inputs = draw(Case(2, 2, 63, 1 if n_keys is None else 5, dtype=torch.float32))
    n_keys = None if n_keys is None else counts(*n_keys)
    exact = reference(*inputs, n_keys)
    for out, expected in zip(kernels.run(*inputs, n_keys), exact, strict=True):
        assert max_abs_error(out, expected) <= 1e-5


@pytest.mark.parametrize("dtype", [FLOAT32, torch.bfloat16])
@pytest.mark.parametrize("n_k, n_keys", [(2, [1, 2]), (64, [64, 63]), (127, [1, 65])])
def test_a_sample_has_its_own_keys(kernels, n_k, n_keys, dtype):
    inputs = draw(Case(2, 2, 65, n_k, dtype=dtype))
    outs = kernels.run(*inputs, counts(*n_keys))
    for name, ratio in ratios(outs, inputs, counts(*n_keys)).items():
        assert ratio <= BUDGETS[name], name
    for gradient in outs[2:]:
        for b, length in enumerate(n_keys):
            assert (gradient[b, :, length:] == 0).all()


@pytest.mark.parametrize("head_dim", [32, 128])
def test_head_dims(kernels, head_dim):
    inputs = draw(Case(2, 1, 70, 40, head_dim))
    n_keys = counts(40, 17)
    for name, ratio in ratios(kernels.run(*inputs, n_keys), inputs, n_keys).items():
        assert ratio <= BUDGETS[name], name


def test_all_keys_counted_is_not_counting(kernels):
    inputs = draw(BATCH)
    counted = kernels.run(*inputs, counts(60, 60, 60))
    assert all(map(torch.equal, counted, kernels.run(*inputs)))


def test_counts_out_of_range_are_nan_in_their_sample_alone(kernels):
    inputs = draw(BATCH)
    wild, right = (kernels.run(*inputs, counts(*n)) for n in ((-7, 2**30, 40), (1, 60, 40)))
    for of_o, x in zip((True, True, False, False), wild, strict=True):
        for b in range(2):
            assert x[b].isnan().all() if of_o else x[b].isnan().any()
    assert all(torch.equal(x[2], y[2]) for x, y in zip(wild, right, strict=True))


@pytest.mark.parametrize("n_k, n_keys", [(BATCH.n_k, COUNTS), (200, [1, 200, 130])])
def test_padding_changes_nothing(kernels, n_k, n_keys):
    q, k, v, do = draw(replace(BATCH, n_k=n_k))
    garbage = [x.clone() for x in (k, v)]
    for x in garbage:
        for b, length in enumerate(n_keys):
            x[b, :, length:] = 1e30
    clean, padded = (kernels.run(q, *kv, do, counts(*n_keys)) for kv in ((k, v), garbage))
    assert all(map(torch.equal, padded, clean))


def test_gradients_are_laid_out_as_the_projections_read_them(kernels):
    o, dq, dk, dv = kernels.run(*draw(BATCH))
    assert o.transpose(1, 2).is_contiguous() and dq.transpose(1, 2).is_contiguous()
    batch, n_heads, n_k, head_dim = dk.shape
    width = n_heads * head_dim
    halves = n_k * 2 * width, head_dim, 2 * width, 1
    assert dk.stride() == dv.stride() == halves
    assert dv.data_ptr() == dk.data_ptr() + width * dk.element_size()


def test_gradients_that_are_to_lie_apart_are_the_same(kernels):
    """As custom operators give them, in memory of their own."""
    q, k, v, do = draw(BATCH)
    plan, inputs = kernels.plan(q, k, v, counts(*COUNTS))
    (o,), saved = plan.forward(inputs, (SCALE,))
    arguments = (do,), tuple(plan.kept(inputs, (o,))), saved, (SCALE,)
    halves = plan.backward(*arguments)
    plan.what = replace(plan.what, apart=True)
    plan.backwards.clear()
    apart = plan.backward(*arguments)
    for one, other in zip(apart[1:], halves[1:], strict=True):
        assert torch.equal(one, other) and one.transpose(1, 2).is_contiguous()
    assert apart[1].untyped_storage().data_ptr() != apart[2].untyped_storage().data_ptr()


@pytest.mark.blas
@pytest.mark.parametrize("magnitude", [0.0, 8.0, 12.0, 30.0, 40.0])
def test_from_all_equal_to_one_dominating_score(kernels, magnitude):
    inputs = draw(Case(2, 1, 70, 40, dtype=torch.float32, magnitude=magnitude))
    outs = kernels.run(*inputs, counts(40, 33))
    for name, ratio in ratios(outs, inputs, counts(40, 33)).items():
        assert ratio <= BUDGETS[name], name


@pytest.mark.parametrize("dtype", [FLOAT32, torch.float16])
@pytest.mark.parametrize("n_k, magnitude", [(11, 12.0), (3, 30.0), (1, 1.0)])
def test_few_keys_of_which_one_has_all_the_weight(kernels, n_k, magnitude, dtype):
    """The true dq and dk all but vanish: what float32 leaves of equal terms is no fault."""
    inputs = draw(Case(2, 2, 70, n_k, dtype=dtype, magnitude=magnitude))
    for name, ratio in ratios(kernels.run(*inputs), inputs).items():
        assert ratio <= BUDGETS[name], name


@pytest.mark.blas
@pytest.mark.parametrize("forward", ["separate", "few_keys"])
@pytest.mark.parametrize("magnitude", [0.0, 1.0, 8.0, 30.0])
def test_lse(forward, magnitude):
    q, k, v, do = draw(Case(2, 2, 70, 40, dtype=torch.float32, magnitude=magnitude))
    lse = KERNELS[forward].lse(q, k, v, counts(40, 33))
    floor = rounding_error.attention(q, k, v, do, SCALE, seen(q, k, counts(40, 33)))["lse"]
    scores = SCALE * q.double() @ k.double().mT
    scores[1, :, :, 33:] = float("-inf")
    assert distance(lse / LOG2_E, scores.logsumexp(-1)) <= Budget.outputs * floor


def test_scores_far_below_zero(kernels):
    """Keys past a ragged end score 0: against these, a probability of 2⁷³⁸ if it were let in."""
    q, k, v, do = draw(Case(2, 2, 33, 20, dtype=torch.float32))
    inputs = (q * 0.01 + 8, k * 0.01 - 8, v, do)
    outs, exact = kernels.run(*inputs, counts(20, 7)), reference(*inputs, counts(20, 7))
    for out, expected in zip(outs, exact, strict=True):
        assert max_abs_error(out, expected) <= 1e-3


def last_key_dropped(inputs):
    q, k, v, do = inputs
    return q, k[:, :, :-1], v[:, :, :-1], do


def scale_off_by_a_thousandth(inputs):
    q, k, v, do = inputs
    return q * 1.001, k, v, do


def output_gradient_of_the_next_row(inputs):
    q, k, v, do = inputs
    return q, k, v, do.roll(1, 2)


# What each must turn red. Where one key has all the weight, a scale moves hardly anything, and dq
# and dk vanish. dv sees a scale less than o does: its floor is that of the weights.
@pytest.mark.parametrize(
    "wrong, n_k, magnitude, named",
    [
        (last_key_dropped, 40, 8.0, ("o", "dq", "dk", "dv")),
        (last_key_dropped, 40, 30.0, ("o", "dv")),
        (last_key_dropped, 3, 30.0, ("o", "dv")),
        (scale_off_by_a_thousandth, 40, 8.0, ("o", "dq", "dk")),
        (scale_off_by_a_thousandth, 40, 30.0, ("o",)),
        (output_gradient_of_the_next_row, 40, 8.0, ("dq", "dk", "dv")),
        (output_gradient_of_the_next_row, 40, 30.0, ("dq", "dk", "dv")),
    ],
)
def test_negative_controls_fail_where_the_floor_is_the_budget(wrong, n_k, magnitude, named):
    """They show what the budgets see, for which one pair of kernels will do."""
    inputs = draw(Case(2, 1, 70, n_k, dtype=torch.float32, magnitude=magnitude))
    outs = list(KERNELS["separate"].run(*wrong(inputs)))
    for i in (2, 3):  # a key that was dropped has no gradient
        outs[i] = torch.nn.functional.pad(outs[i], (0, 0, 0, n_k - outs[i].shape[2]))
    found = ratios(outs, inputs)
    for name in named:
        assert found[name] > 2 * BUDGETS[name], name


@pytest.mark.parametrize("n_k, magnitude", [(40, 8.0), (3, 30.0)])
def test_a_delta_of_zero_fails_where_the_floor_is_the_budget(n_k, magnitude):
    """ds = p dp in place of p (dp − delta): where one key has all the weight, dq and dk show it."""
    inputs = draw(Case(2, 1, 70, n_k, dtype=torch.float32, magnitude=magnitude))
    q, k, v, do = inputs
    plan, tensors = KERNELS["separate"].plan(q, k, v)
    (o,), saved = plan.forward(tensors, (SCALE,))
    kept = tuple(plan.kept(tensors, (torch.zeros_like(o),)))
    gradients = plan.backward((do,), kept, saved, (SCALE,))
    found = ratios((o, *gradients), inputs)
    assert found["dq"] > 5 * BUDGETS["dq"] and found["dk"] > 5 * BUDGETS["dk"]
    assert found["dv"] <= BUDGETS["dv"]


def test_split_reduction_is_the_single_pass(monkeypatch):
    """A segment a tile: dk and dv of the portable kernels through float32 partials."""
    inputs = draw(Case(3, 1, 67, 60, dtype=torch.float32))
    n_keys = counts(*COUNTS)
    whole = KERNELS["separate"].run(*inputs, n_keys)
    segments, partials = [], triton_backward.Partials

    def counted(k, n, whole):
        segments.append(n)
        return partials(k, n, whole)

    monkeypatch.setattr(triton_backward, "MIN_SEGMENT_TILES", 1)
    monkeypatch.setattr(triton_backward, "Partials", counted)
    split, again = (KERNELS["separate"].run(*inputs, n_keys) for _ in range(2))
    assert segments == [5, 5]
    assert all(map(torch.equal, split, again))
    for a, b in zip(split, whole, strict=True):
        assert max_abs_error(a, b) <= 1e-5 and a.stride() == b.stride()


def test_a_launch_keeps_no_tensor(kernels):
    q, k, v, do = (x.clone() for x in draw(BATCH))
    plan, inputs = kernels.plan(q, k, v)
    (o,), saved = plan.forward(inputs, (SCALE,))
    plan.backward((do,), tuple(plan.kept(inputs, (o,))), saved, (SCALE,))
    gone = [weakref.ref(x) for x in (q, k, v, do, o, *saved)]
    del q, k, v, do, o, saved, inputs
    gc.collect()
    assert [one() for one in gone] == [None] * len(gone)
    assert plan.backwards


def test_configurations_differ():
    what = Call(OPERATOR.problem("bfloat16", **SIZES), devices.named("H200"), ("q",))
    for operation in (FORWARD, SEPARATE, FUSED):
        for kernel in selection.kernels_of(operation).values():
            configs = kernel.configs(what)
            as_json = [json.dumps(tuned_tables.as_json(config)) for config in configs]
            assert len(set(as_json)) == len(configs) > 0
