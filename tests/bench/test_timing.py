"""Tests timing on a clock that moves only when a call says so."""

import math
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from tnp.bench import timing
from tnp.bench.policy import Latency, Policy
from tnp.bench.timing import first_call, half_width, measure, measure_interleaved, settled

CPU = torch.device("cpu")
POLICY = Policy(
    warmup_s=0.01, min_samples=30, max_sampling_s=0.5, long_step_s=1.0, long_samples=3
)  # fmt: skip


class Clock:
    """Counts seconds that pass when a call is made; `call(durations_ms)` takes the next of them."""

    def __init__(self) -> None:
        self.now = 0.0

    def call(self, durations_ms: Iterator[float]) -> Callable[[], None]:
        def run() -> None:
            self.now += next(durations_ms) / 1e3

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)
    return clock


def forever(*durations_ms: float) -> Iterator[float]:
    while True:
        yield from durations_ms


def test_calls_rotate_and_every_sample_is_kept() -> None:
    order = []
    calls = [lambda i=i: order.append(i) for i in range(3)]
    measurement = measure(calls, CPU, POLICY)
    assert order[:6] == [0, 1, 2, 0, 1, 2]
    assert len(measurement.samples_ms) >= POLICY.min_samples
    assert len(order) == measurement.n_warmup + len(measurement.samples_ms)


def test_long_calls_warm_up_once_and_are_timed_as_often_as_there_is_time(clock: Clock) -> None:
    durations = iter([2500.0, 2000.0, 2001.0, 2002.0])
    measurement = measure([clock.call(durations)], CPU, POLICY)
    assert measurement.samples_ms == pytest.approx([2000.0, 2001.0, 2002.0])
    assert measurement.n_warmup == 1
    assert measurement.settled and measurement.note is None
    policy = Policy(max_sampling_s=6.0, min_samples=8, long_step_s=0.4, long_samples=3)
    for ms, n_samples in ((2500.0, 3), (1100.0, 5), (500.0, 8)):
        found = measure([clock.call(forever(ms))], CPU, policy)
        assert len(found.samples_ms) == n_samples and found.n_warmup == 1


def test_warms_up_for_as_long_as_it_was_told_and_until_medians_agree(clock: Clock) -> None:
    policy = Policy(warmup_s=2.0, max_sampling_s=0.5)
    measurement = measure([clock.call(forever(10.0))], CPU, policy)
    assert measurement.began == pytest.approx(2.0, rel=0.6)
    assert measurement.n_warmup == pytest.approx(measurement.began * 100)
    durations = iter([900.0] + [800.0] * 3 + [700.0] * 3 + [600.0] * 3 + [500.0] * 100)
    policy = Policy(warmup_s=2.0, min_samples=30, max_sampling_s=1.0, long_step_s=1.0)
    measurement = measure([clock.call(durations)], CPU, policy)
    assert measurement.samples_ms == pytest.approx([500.0] * 30)
    falling = (100.0 * 0.999**i for i in range(10_000))  # never settles
    measurement = measure([clock.call(falling)], CPU, POLICY)
    assert len(measurement.samples_ms) >= POLICY.min_samples
    assert not measurement.settled and "1%" in measurement.note


def test_samples_are_taken_until_their_mean_is_known(clock: Clock) -> None:
    policy = Policy(warmup_s=0.01, min_samples=30, half_width=0.005, max_sampling_s=6.0)
    generator = np.random.default_rng(0)
    steady = measure([clock.call(forever(10.0))], CPU, policy)
    wide = measure([clock.call(iter(generator.normal(10, 0.4, 10_000)))], CPU, policy)
    wild = measure([clock.call(iter(generator.normal(10, 3.0, 10_000)))], CPU, policy)
    assert len(steady.samples_ms) == 30
    assert 30 < len(wide.samples_ms) < 600
    assert half_width(wide.samples_ms) <= 0.005
    assert half_width(wild.samples_ms) > 0.005
    assert sum(wild.samples_ms) / 1e3 == pytest.approx(6.0, rel=0.05)


def test_the_half_width_of_alike_neighbours_is_wider() -> None:
    """Autocorrelated samples know their mean less well than their spread says."""
    generator = np.random.default_rng(1)
    noise = generator.normal(0, 0.01, 1000)
    walk = [0.0]
    for step in noise[1:]:
        walk.append(0.95 * walk[-1] + step)
    independent = 1 + np.std(walk) * generator.normal(0, 1, 1000)
    assert half_width(1 + np.array(walk)) > 2 * half_width(independent)
    assert half_width([1.0] * 9) == math.inf


def test_samples_are_per_launch_and_say_when_they_ended(clock: Clock) -> None:
    (measurement,) = measure_interleaved(
        [[clock.call(forever(20.0))]], CPU, POLICY, launches_per_call=10
    )
    assert measurement.samples_ms == pytest.approx([2.0] * 30)
    assert measurement.ended_s == pytest.approx([0.02 * i for i in range(1, 31)])
    assert measurement.n_launches == 10


def test_contenders_take_turns_in_an_order_drawn_anew_and_inputs_rotate() -> None:
    order = []
    contenders = [
        [lambda who=who, i=i: order.append((who, i)) for i in range(2)] for who in range(3)
    ]
    measurements = measure_interleaved(contenders, CPU, POLICY)
    rounds = [tuple(who for who, _ in order[i : i + 3]) for i in range(0, len(order), 3)]
    assert all(sorted(turn) == [0, 1, 2] for turn in rounds)
    # Every one follows every other one, where each cyclic order has only three of the six.
    assert len(Counter(rounds)) == 6
    assert [i for _, i in order] == [turn % 2 for turn in range(len(order))]
    for measurement in measurements:
        assert len(order) == 3 * (measurement.n_warmup + len(measurement.samples_ms))


def test_drift_hits_all_alike(clock: Clock) -> None:
    """Equal contenders on a device that slows by half while they are timed."""
    policy = Policy(warmup_s=0, min_samples=400, max_sampling_s=0.1, long_step_s=1)
    slowing = (1.0 + i / 3000 for i in range(100_000))
    measurements = measure_interleaved([[clock.call(slowing)]] * 4, CPU, policy)
    medians = [float(np.median(measurement.samples_ms)) for measurement in measurements]
    assert clock.now > 1.5
    assert max(medians) / min(medians) < 1.002


def test_one_long_call_makes_the_rounds_of_all_few_and_many_short_ones_do_not(clock: Clock) -> None:
    contenders = [[clock.call(forever(ms))] for ms in (400.0, 1100.0)]
    fast, slow = measure_interleaved(contenders, CPU, POLICY)
    assert fast.samples_ms == pytest.approx([400.0] * 3)
    assert slow.samples_ms == pytest.approx([1100.0] * 3)
    assert slow.n_warmup == fast.n_warmup == 1
    contenders = [[clock.call(forever(200.0))] for _ in range(9)]
    measurements = measure_interleaved(contenders, CPU, POLICY)
    assert {len(measurement.samples_ms) for measurement in measurements} == {30}


def test_contenders_settle_together(clock: Clock) -> None:
    """One contender's samples vary by more than a device drifts: whole rounds are judged."""
    generator = np.random.default_rng(3)
    noisy = [[clock.call(iter(generator.normal(10, 0.4, 10_000)))] for _ in range(9)]
    policy = Policy(warmup_s=0.01, min_samples=60, max_sampling_s=0.1)
    measurements = measure_interleaved(noisy, CPU, policy)
    assert all(measurement.settled and measurement.note is None for measurement in measurements)
    alone = [settled(measurement.samples_ms) for measurement in measurements]
    assert not all(alone)

    slowing = (10.0 * 1.0005**i for i in range(10_000))
    drifting = measure_interleaved([[clock.call(slowing)]] * 3, CPU, policy)
    assert not any(measurement.settled for measurement in drifting)
    assert "1%" in drifting[0].note


@pytest.mark.parametrize("name", ["min_samples", "long_samples"])
def test_an_empty_policy_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0: it must be at least 1"):
        Policy(**{name: 0})


def test_latency_flushes_before_each_call_and_takes_turns(monkeypatch):
    seen = []
    monkeypatch.setattr(timing, "_flush", lambda device, caches: lambda: seen.append("flush"))
    calls = [[lambda name=name: seen.append(name)] for name in "ab"]
    measured = timing.measure_latency(
        calls, CPU, Latency(warmup_calls=2, launches=9, flushed_caches=2)
    )
    assert [len(one.samples_ms) for one in measured] == [9, 9]
    assert {(one.n_launches, one.n_warmup) for one in measured} == {(1, 2)}
    assert seen[::2] == ["flush"] * 22
    assert all(set(seen[i : i + 4]) == {"flush", "a", "b"} for i in range(0, 44, 4))
    assert timing.measure_latency([], CPU, Latency(1, 1, 1)) == []
    assert measure_interleaved([], CPU, POLICY) == []
    assert first_call(lambda: seen.append("once"), CPU) >= 0 and seen.count("once") == 1
