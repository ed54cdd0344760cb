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
    calls: Sequence[Callable[[], object]],
    device: torch.device,
    policy: Policy,
    launches_per_call: int = 1,
) -> Measurement:
    """Time `calls` in rotation, each of which has run before; samples are per launch.

    A call longer than `long_step_s` counts its first run as the warm-up: `long_samples` follow.
    """
    start = time.perf_counter()
    rotation = itertools.cycle(calls)
    samples = time_calls(rotation, 1, device)
    if samples[0] > policy.long_step_s * 1e3:
        samples += time_calls(rotation, policy.long_samples - 1, device)
        n_warmup, settled = 1, True
    else:
        n_warmup, settled = _warm_up(rotation, samples[0], device, policy)
        samples = time_calls(rotation, policy.min_samples, device)
    return Measurement(
        samples_ms=[sample / launches_per_call for sample in samples],
        n_warmup=n_warmup,
        settled=settled,
        measure_s=time.perf_counter() - start,
    )


def _warm_up(
    rotation: Iterator[Callable[[], object]], call_ms: float, device: torch.device, policy: Policy
) -> tuple[int, bool]:
    """Run until settled; returns the number of calls, and whether they settled."""
    least, most = CHUNK_CALLS
    chunk = min(max(round(policy.warmup_s * 250 / max(call_ms, 1e-3)), least), most)
    start = time.perf_counter()
    previous = statistics.median(time_calls(rotation, chunk, device))
    n_calls = 1 + chunk
    while True:
        median = statistics.median(time_calls(rotation, chunk, device))
        n_calls += chunk
        elapsed = time.perf_counter() - start
        settled = abs(median / previous - 1) <= SETTLED_WITHIN
        if settled and elapsed >= policy.warmup_s:
            return n_calls, True
        if elapsed >= WARMUP_LIMIT * policy.warmup_s:
            return n_calls, False
        previous = median
