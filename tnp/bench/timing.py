"""Timing: warm until settled, then a pair of marks around every call, synchronized once at the end.

A mark is a CUDA event on the current stream, or a reading of the host clock on the CPU. Events
bound what the device did between them, launch gaps included, so the samples of a loop add up to
its wall time; the host never waits inside the loop, as it would not in training.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

# Warm-up has settled when the medians of two successive chunks agree within this share …
SETTLED_WITHIN = 0.02
# … and gives up, saying so, after this many times the least warm-up.
WARMUP_LIMIT = 10
CHUNK_CALLS = (3, 100)

Mark = torch.cuda.Event | float


@dataclass(frozen=True)
class Policy:
    """How long to warm up and how often to sample; `timing` in config.yaml."""

    warmup_s: float
    min_samples: int
    long_step_s: float
    long_samples: int

    @classmethod
    def from_parameters(cls, timing: dict) -> "Policy":
        policy = cls(**{name: timing[name] for name in cls.__dataclass_fields__})
        if policy.min_samples < 1 or policy.long_samples < 1:
            raise ValueError(
                f"min_samples {policy.min_samples} and long_samples {policy.long_samples} "
                "must both be at least 1"
            )
        return policy


@dataclass(frozen=True)
class Measurement:
    """Raw samples in milliseconds, in the order taken, and what came before them."""

    samples_ms: list[float]
    n_warmup: int
    settled: bool
    measure_s: float

    @property
    def note(self) -> str | None:
        if self.settled:
            return None
        return f"two successive medians never agreed within {SETTLED_WITHIN:.0%} while warming up"


def mark(device: torch.device) -> Mark:
    """A point in time on the device's own clock."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_ms(start: Mark, end: Mark) -> float:
    """Milliseconds between two marks of one device, which must have passed the later one."""
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_calls(calls: Iterator[Callable[[], object]], n: int, device: torch.device) -> list[float]:
    """Milliseconds of each of the next `n` calls, back to back."""
    marks = []
    for call in itertools.islice(calls, n):
        start = mark(device)
        call()
        marks.append((start, mark(device)))
    synchronize(device)
    return [elapsed_ms(start, end) for start, end in marks]


def first_call(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the first call: kernels compile, libraries pick algorithms, memory is reserved."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def measure(
    calls: Sequence[Callable[[], object]], device: torch.device, policy: Policy
) -> Measurement:
    """Time `calls` in rotation, each of which has run before.

    A call longer than `long_step_s` counts its first run as the warm-up: `long_samples` follow.
    """
    (measurement,) = measure_interleaved([calls], device, policy)
    return measurement


def measure_interleaved(
    contenders: Sequence[Sequence[Callable[[], object]]],
    device: torch.device,
    policy: Policy,
    launches_per_call: int = 1,
) -> list[Measurement]:
    """Time several contenders in rounds, one call of each a round, so that drift hits all alike.

    Every call has run before. Each round starts with the next contender, and each call in it takes
    the next of its contender's inputs, so that none finds in cache what the one before it read.
    Warm-up ends when every contender has settled. A round longer than `long_step_s` counts its
    first run as the warm-up: `long_samples` rounds follow. Samples are per launch.
    """
    if not contenders:
        return []
    start = time.perf_counter()
    turns = _turns(contenders)
    samples = _time_rounds(turns, 1, len(contenders), device)
    n_warmup, settled = 1, [True] * len(contenders)
    round_ms = sum(first for (first,) in samples)
    if round_ms > policy.long_step_s * 1e3:
        rest = _time_rounds(turns, policy.long_samples - 1, len(contenders), device)
        samples = [first + others for first, others in zip(samples, rest, strict=True)]
    else:
        n_warmup, settled = _warm_up(turns, len(contenders), round_ms, device, policy)
        samples = _time_rounds(turns, policy.min_samples, len(contenders), device)
    measure_s = time.perf_counter() - start
    return [
        Measurement(
            samples_ms=[time_ms / launches_per_call for time_ms in own],
            n_warmup=n_warmup,
            settled=own_settled,
            measure_s=measure_s,
        )
        for own, own_settled in zip(samples, settled, strict=True)
    ]


def _turns(
    contenders: Sequence[Sequence[Callable[[], object]]],
) -> Iterator[tuple[int, Callable[[], object]]]:
    """Whose turn it is, and the call, round after round."""
    turns = itertools.count()
    for first in itertools.count():
        for place in range(len(contenders)):
            contender = (first + place) % len(contenders)
            calls = contenders[contender]
            yield contender, calls[next(turns) % len(calls)]


def _time_rounds(
    turns: Iterator[tuple[int, Callable[[], object]]],
    n_rounds: int,
    n_contenders: int,
    device: torch.device,
) -> list[list[float]]:
    """Milliseconds of the next `n_rounds` calls of each contender."""
    taken = list(itertools.islice(turns, n_rounds * n_contenders))
    times = time_calls((call for _, call in taken), len(taken), device)
    samples: list[list[float]] = [[] for _ in range(n_contenders)]
    for (contender, _), time_ms in zip(taken, times, strict=True):
        samples[contender].append(time_ms)
    return samples


def _warm_up(
    turns: Iterator[tuple[int, Callable[[], object]]],
    n_contenders: int,
    round_ms: float,
    device: torch.device,
    policy: Policy,
) -> tuple[int, list[bool]]:
    """Run until all have settled; returns the number of rounds, and who settled."""
    least, most = CHUNK_CALLS
    chunk = min(max(round(policy.warmup_s * 250 / max(round_ms, 1e-3)), least), most)
    start = time.perf_counter()

    def medians() -> list[float]:
        return list(map(statistics.median, _time_rounds(turns, chunk, n_contenders, device)))

    previous = medians()
    n_rounds = 1 + chunk
    while True:
        latest = medians()
        n_rounds += chunk
        elapsed = time.perf_counter() - start
        settled = [
            abs(after / before - 1) <= SETTLED_WITHIN
            for before, after in zip(previous, latest, strict=True)
        ]
        if all(settled) and elapsed >= policy.warmup_s:
            return n_rounds, settled
        if elapsed >= WARMUP_LIMIT * policy.warmup_s:
            return n_rounds, settled
        previous = latest
