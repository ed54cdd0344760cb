import pytest
import torch

from tnp.bench import timing
from tnp.bench.timing import Policy, first_call, measure

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
    assert measure([lambda: None], CPU, POLICY, launches_per_call=10).samples_ms == [2.0] * 7


def test_first_call_runs_it_once():
    calls = []
    assert first_call(lambda: calls.append(1), CPU) >= 0
    assert calls == [1]


def test_an_empty_policy_is_refused():
    with pytest.raises(ValueError, match="min_samples 0"):
        Policy.from_parameters(
            {"warmup_s": 1, "min_samples": 0, "long_step_s": 1, "long_samples": 1, "timeout_s": 9}
        )
