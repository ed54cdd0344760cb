"""Tests kernels of attention called directly: n_keys, extreme scores, segments, memory.

On the CPU portable kernels are interpreted, and kernels for Hopper are skipped.
"""

import gc
import json
import weakref
from dataclasses import dataclass, replace

import pytest
import torch

from tests.ops.problems import DEVICE
from tnp.dispatch import devices, plans, selection, tuned_tables
from tnp.dispatch.spec import Call
from tnp.dispatch.spec import Case as OperatorsCase
from tnp.gates.checks import max_abs_error
from tnp.ops._shared.random_values import Random
from tnp.ops.attention import FORWARD, FUSED, OPERATOR, SEPARATE, few_keys
from tnp.ops.attention.portable import backward as portable_backward
from tnp.ops.attention.primitives import LaunchConfig
from tnp.ops.attention.torch_forms import reference as formula

SCALE = 0.125


@dataclass(frozen=True)
class Case:
    """Holds sizes, dtype, and the factor that q and k are scaled up by."""

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
    """Launches a forward and a backward kernel by plans, with their default configurations."""

    forward: str
    backward: str
    implementation: str

    def run(self, q, k, v, do, n_keys=None) -> tuple[torch.Tensor, ...]:
        """Returns o, dq, dk, dv; skips the test where the kernels do not serve the problem."""
        plan, inputs = self.plan(q, k, v, n_keys)
        (o,), saved = plan.forward(inputs, (SCALE,))
        return o, *plan.backward((do,), tuple(plan.kept(inputs, (o,))), saved, (SCALE,))

    def plan(self, q, k, v, n_keys=None, wanted=("q", "k", "v")):
        """Returns a plan with these kernels forced, and the inputs as it takes them."""
        inputs = (q, k, v, n_keys, None, None)
        what = selection.describe(OPERATOR, inputs, (), wanted, TARGET)
        backward = SEPARATE if self.implementation == "separate" else FUSED
        forced = {}
        for operation, name in ((FORWARD, self.forward), (backward, self.backward)):
            kernel = selection.kernels_of(operation)[name]
            if reason := kernel.refuses(what):
                pytest.skip(reason)
            forced[operation.name] = name, kernel.configs(what)[0]
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
    """Returns q, k, v, views of one projection, and do."""
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
    """Returns o, dq, dk, dv in `dtype`, each sample with its own keys alone."""
    samples = []
    for b, length in enumerate([k.shape[2]] * len(q) if n_keys is None else n_keys.tolist()):
        inputs = [x[b : b + 1].to(dtype).requires_grad_() for x in (q, k, v)]
        keys = (x[:, :, :length] for x in inputs[1:])
        o = formula(inputs[0], *keys, None, None, None, SCALE)
        samples.append((o.detach(), *torch.autograd.grad(o, inputs, do[b : b + 1].to(dtype))))
    return [torch.cat(heads) for heads in zip(*samples, strict=True)]


def test_one_key_is_its_value_and_has_no_gradient_to_q_and_k(kernels):
    inputs = draw(Case(2, 2, 63, 1, dtype=torch.float32))
    for out, expected in zip(kernels.run(*inputs), reference(*inputs), strict=True):
        assert max_abs_error(out, expected) <= 1e-5


def test_padding_changes_nothing(kernels):
    n_keys = 1, 100, 70
    q, k, v, do = draw(replace(BATCH, n_k=100))
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


def test_scores_far_below_zero(kernels):
    """Keys past a ragged end score 0: against these, a probability of 2⁷³⁸ if it were let in."""
    q, k, v, do = draw(Case(2, 2, 33, 20, dtype=torch.float32))
    inputs = (q * 0.01 + 8, k * 0.01 - 8, v, do)
    outs, exact = kernels.run(*inputs, counts(20, 7)), reference(*inputs, counts(20, 7))
    for out, expected in zip(outs, exact, strict=True):
        assert max_abs_error(out, expected) <= 1e-3


def test_split_reduction_is_the_single_pass(monkeypatch):
    """A segment a tile: dk and dv of the portable kernels through float32 partials."""
    inputs = draw(Case(3, 1, 67, 60, dtype=torch.float32))
    n_keys = counts(*COUNTS)
    whole = KERNELS["separate"].run(*inputs, n_keys)
    segments, partials = [], portable_backward.Partials

    def counted(k, n, whole):
        segments.append(n)
        return partials(k, n, whole)

    monkeypatch.setattr(portable_backward, "MIN_SEGMENT_TILES", 1)
    monkeypatch.setattr(portable_backward, "Partials", counted)
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


# -------------------------------------------------------------------------------------- few keys

FEW = KERNELS["few_keys"]


def few_call(dtype: str = "bfloat16", gpu: str = "H200", **sizes) -> Call:
    size = {"batch": 64, "n_heads": 8, "n_q": 564, "n_k": 64, "head_dim": 64} | sizes
    return Call(OPERATOR.problem(dtype, **size), devices.named(gpu), OPERATOR.differentiated)


@pytest.fixture
def segments(monkeypatch) -> list[int]:
    """Returns the numbers of segments of every backward pass with more than one."""
    found, partials = [], few_keys.Partials

    def counted(k, n, whole):
        found.append(n)
        return partials(k, n, whole)

    monkeypatch.setattr(few_keys, "Partials", counted)
    return found


def backward(inputs, config: LaunchConfig, n_keys=None, multiprocessors: int = 132):
    """Returns dq, dk, dv on a GPU of as many multiprocessors."""
    q, k, v, do = inputs
    plan, tensors = FEW.plan(q, k, v, n_keys)
    (o,), saved = plan.forward(tensors, (SCALE,))
    what = replace(plan.what, target=replace(TARGET, multiprocessors=multiprocessors))
    arguments = (do,), (*tensors, o), saved
    return few_keys.BACKWARD.prepare(what, config, arguments)(arguments, (SCALE,))


def test_segments_add_up_to_the_single_launch(segments):
    """Five tiles in segments of two: the last is short."""
    inputs, n_keys = draw(Case(2, 2, 290, 40, dtype=torch.float32)), counts(40, 9)
    config = LaunchConfig(64, 64, 4, 1)
    split, again = (backward(inputs, config, n_keys) for _ in range(2))
    assert segments == [2, 2]
    assert all(map(torch.equal, split, again))
    whole = backward(inputs, config, n_keys, multiprocessors=2)
    assert segments == [2, 2]
    for a, b in zip(split, whole, strict=True):
        assert max_abs_error(a, b) <= 1e-5 and a.stride() == b.stride()


def test_the_backward_pass_does_not_read_o():
    q, k, v, do = draw(Case(1, 2, 70, 40))
    plan, inputs = FEW.plan(q, k, v)
    (o,), saved = plan.forward(inputs, (SCALE,))
    first, again = (
        plan.backward((do,), (*inputs, x), saved, (SCALE,))
        for x in (o, torch.full_like(o, float("nan")))
    )
    assert all(map(torch.equal, first, again))


def test_an_lse_off_by_a_rounding_does_not_unbalance_a_row():
    """Σ_j ds_j = 0 whatever the scale of p: keys that are all equal leave no gradient to q."""
    q, k, v, do = draw(Case(1, 2, 70, 40, dtype=torch.float32))
    plan, inputs = FEW.plan(q, k[:, :, :1].expand_as(k), v)
    (o,), (lse,) = plan.forward(inputs, (SCALE,))
    dq, _, _ = plan.backward((do,), (*inputs, o), (lse + 0.01,), (SCALE,))
    assert dq.abs().max() <= 1e-4


def test_limits_of_few_keys():
    for kernel in (few_keys.FORWARD, few_keys.BACKWARD):
        assert kernel.refuses(few_call()) is None
        assert kernel.refuses(few_call(n_k=257)) == "its tile holds 256 keys and there are 257"
        refused = kernel.refuses(few_call("float32", n_k=128, head_dim=128))
        assert refused == "no tile of 128 keys at head_dim 128 fits the registers"
    assert few_keys.FORWARD.refuses(few_call("float32", head_dim=128)) is None
    assert few_keys.BACKWARD.refuses(few_call("float32", head_dim=128)) is not None
    assert few_keys.FORWARD.refuses(few_call(n_k=256)) is None
    for kernel, gpu in ((few_keys.BACKWARD, "H200"), (few_keys.FORWARD, "A100")):
        refused = kernel.refuses(few_call(n_k=129, gpu=gpu))
        assert refused == "no tile of 129 keys at head_dim 64 fits the registers"
