import pytest
import torch

from tnp.bench import timing
from tnp.bench.timing import Policy, first_call, measure, measure_interleaved

CPU = torch.device("cpu")
POLICY = Policy(warmup_s=0.01, min_samples=7, long_step_s=1.0, long_samples=3)


def scripted(monkeypatch, durations):
    """Have every call take the next of `durations`, in milliseconds."""
    durations = iter(durations)

    def time_calls(calls, n, device):
        return [next(durations) for _ in range(n)]

    monkeypatch.setattr(timing, "time_calls", time_calls)


def forever(*durations):
    while True:
        yield from durations


def test_calls_rotate_and_every_sample_is_kept():
    order = []
    calls = [lambda i=i: order.append(i) for i in range(3)]
    measurement = measure(calls, CPU, POLICY)
    assert order[:6] == [0, 1, 2, 0, 1, 2]
    assert len(measurement.samples_ms) == POLICY.min_samples
    assert len(order) == measurement.n_warmup + POLICY.min_samples


def test_a_long_step_warms_up_once(monkeypatch):
    scripted(monkeypatch, [2000.0, 2001.0, 2002.0])
    measurement = measure([lambda: None], CPU, POLICY)
    assert measurement.samples_ms == [2000.0, 2001.0, 2002.0]
    assert measurement.n_warmup == 1
    assert measurement.note is None


def test_warms_up_until_medians_agree(monkeypatch):
    falling = [900.0] + [800.0] * 3 + [700.0] * 3 + [600.0] * 3
    scripted(monkeypatch, falling + [500.0] * 100)
    monkeypatch.setattr(timing, "WARMUP_LIMIT", float("inf"))
    policy = Policy(warmup_s=1e-9, min_samples=7, long_step_s=1.0, long_samples=3)
    measurement = measure([lambda: None], CPU, policy)
    assert measurement.settled
    assert measurement.samples_ms == [500.0] * 7


def test_what_never_settles_is_timed_and_says_so(monkeypatch):
    scripted(monkeypatch, forever(*[100.0] * 3, *[200.0] * 3))
    measurement = measure([lambda: None], CPU, POLICY)
    assert len(measurement.samples_ms) == POLICY.min_samples
    assert "2%" in measurement.note


def test_samples_are_per_launch(monkeypatch):
    scripted(monkeypatch, forever(20.0))
    (measurement,) = measure_interleaved([[lambda: None]], CPU, POLICY, launches_per_call=10)
    assert measurement.samples_ms == [2.0] * 7


def test_contenders_take_turns_and_each_call_has_other_inputs():
    order = []
    contenders = [
        [lambda who=who, i=i: order.append((who, i)) for i in range(2)] for who in range(3)
    ]
    measurements = measure_interleaved(contenders, CPU, POLICY)
    assert [who for who, _ in order[:9]] == [0, 1, 2, 1, 2, 0, 2, 0, 1]
    assert [i for _, i in order] == [turn % 2 for turn in range(len(order))]
    for measurement in measurements:
        assert len(measurement.samples_ms) == POLICY.min_samples
        assert len(order) == 3 * (measurement.n_warmup + POLICY.min_samples)


@pytest.fixture
def own_durations(monkeypatch):
    """Have a call take the milliseconds that it returns."""

    def time_calls(calls, n, device):
        return [call() for call, _ in zip(calls, range(n), strict=True)]

    monkeypatch.setattr(timing, "time_calls", time_calls)


def test_samples_go_to_whose_they_are(own_durations):
    measurements = measure_interleaved([[lambda ms=ms: ms] for ms in (1.0, 2.0, 3.0)], CPU, POLICY)
    assert [measurement.samples_ms for measurement in measurements] == [
        [ms] * POLICY.min_samples for ms in (1.0, 2.0, 3.0)
    ]


def test_drift_hits_all_alike(monkeypatch):
    """Equal contenders on a clock that slows by half while they are timed."""
    passed = 0

    def time_calls(calls, n, device):
        nonlocal passed
        passed += n
        return [1.0 + (passed - n + i) / 3000 for i in range(n)]

    monkeypatch.setattr(timing, "time_calls", time_calls)
    policy = Policy(warmup_s=0, min_samples=400, long_step_s=1, long_samples=3)
    medians = [
        sorted(measurement.samples_ms)[200]
        for measurement in measure_interleaved([[lambda: None]] * 4, CPU, policy)
    ]
    assert passed > 1500
    assert max(medians) / min(medians) < 1.002


def test_a_long_round_is_timed_as_often_for_all(monkeypatch):
    scripted(monkeypatch, forever(400.0, 700.0, 700.0, 400.0))
    slow, fast = measure_interleaved([[lambda: None]] * 2, CPU, POLICY)
    assert (slow.samples_ms, fast.samples_ms) == ([400.0] * 3, [700.0] * 3)
    assert slow.n_warmup == fast.n_warmup == 1


def test_only_who_did_not_settle_says_so(own_durations):
    durations = forever(*[100.0] * 3, *[200.0] * 3)
    contenders = [[lambda: 100.0], [lambda: next(durations)]]
    steady, wild = measure_interleaved(contenders, CPU, POLICY)
    assert steady.note is None and "2%" in wild.note


def test_nobody_to_time_is_no_measurement():
    assert measure_interleaved([], CPU, POLICY) == []


def test_first_call_runs_it_once():
    calls = []
    assert first_call(lambda: calls.append(1), CPU) >= 0
    assert calls == [1]


def test_an_empty_policy_is_refused():
    with pytest.raises(ValueError, match="min_samples 0"):
        Policy.from_parameters(
            {"warmup_s": 1, "min_samples": 0, "long_step_s": 1, "long_samples": 1, "timeout_s": 9}
        )
