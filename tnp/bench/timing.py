"""Times calls: warms up until times are steady, then puts a pair of marks around every call.

A mark is a CUDA event on the current stream, or a reading of the host clock on the CPU. Two events
bound the device's work between them, launch gaps included. So the samples of a loop add up to its
wall time, unless something runs between the calls. As in training, the host does not wait after
each call, but after many rounds.
"""

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from tnp.bench.policy import Latency, Policy

# Warm-up ends when the medians of two successive chunks agree within this share, or after
# WARMUP_LIMIT times the least warm-up.
WARM_WITHIN, WARMUP_LIMIT = 0.02, 3
CHUNK_CALLS = (3, 100)  # rounds, at least and at most: a chunk aims at a quarter of warm-up

# Rounds are stable if the medians of their first and last third agree within this share. A single
# contender's samples are too noisy for that: they vary by 4 % at an H200's power limit.
SETTLED_WITHIN = 0.01
# Successive samples are correlated, so their spread says little about the error of their mean.
# Means of ten batches are nearly independent. 2.26 is Student's 97.5 % quantile for ten of them.
N_BATCHES, T_QUANTILE = 10, 2.26

Mark = torch.cuda.Event | float
Call = Callable[[], object]
Spans = list[tuple[Mark, Mark]]  # one contender's samples, in the order taken
Rounds = Callable[[int], list[Spans]]  # takes a number of rounds of all contenders


@dataclass(frozen=True)
class Measurement:
    """Holds raw samples in milliseconds, in the order taken, and how they were taken.

    A sample is the mean of `n_launches`. It ended `ended_s` seconds after sampling began, at
    `began` on the host's `time.perf_counter`. Sampling all contenders took `wall_s` on that clock,
    from one wait for the device to another.
    """

    samples_ms: list[float]
    ended_s: list[float]
    n_launches: int
    n_warmup: int
    settled: bool
    began: float
    wall_s: float
    measure_s: float

    def of_each(self, n: int) -> "Measurement":
        """Returns the measurement of launches that each do the timed work n times."""
        samples = [sample / n for sample in self.samples_ms]
        return replace(self, samples_ms=samples, n_launches=n * self.n_launches)

    @property
    def note(self) -> str | None:
        if self.settled:
            return None
        return f"the first and the last third of the rounds are {SETTLED_WITHIN:.0%} or more apart"


def merged(parts: Sequence[Measurement]) -> Measurement:
    """Returns the samples of equal contenders of one measurement, in the order taken."""
    taken = sorted(
        sample for part in parts for sample in zip(part.ended_s, part.samples_ms, strict=True)
    )
    ended_s, samples_ms = map(list, zip(*taken, strict=True))
    n_warmup = sum(part.n_warmup for part in parts)
    return replace(parts[0], samples_ms=samples_ms, ended_s=ended_s, n_warmup=n_warmup)


def mark(device: torch.device) -> Mark:
    """Returns a point in time on the device's own clock."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_ms(start: Mark, end: Mark) -> float:
    """Returns the milliseconds between two marks. The device must have passed the later one."""
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def call_ms(call: Call, device: torch.device) -> float:
    """Returns the milliseconds of one call."""
    start = mark(device)
    call()
    end = mark(device)
    synchronize(device)
    return elapsed_ms(start, end)


def first_call(call: Call, device: torch.device) -> float:
    """Returns the seconds of the first call, which compiles kernels and reserves memory."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def measure(calls: Sequence[Call], device: torch.device, policy: Policy) -> Measurement:
    """Times `calls` in rotation, each of which has run before."""
    (measurement,) = measure_interleaved([calls], device, policy)
    return measurement


def measure_interleaved(
    contenders: Sequence[Sequence[Call]],
    device: torch.device,
    policy: Policy,
    launches_per_call: int = 1,
) -> list[Measurement]:
    """Times several contenders in rounds, so that drift affects all equally.

    A round has one call of each. Every call has run before. Each round has a new random order, so
    that no contender always follows the same one. Successive calls, of whichever contender, take
    different inputs where there are several, so that the cache does not hold them. Warm-up ends
    when every contender is stable. If a call is longer than `policy.long_step_s`, one round is the
    warm-up. Samples are per launch.
    """
    if not contenders:
        return []
    start = time.perf_counter()
    rounds = partial(_rounds, _turns(contenders), len(contenders), device)
    calls_ms = [elapsed_ms(*spans[0]) for spans in rounds(1)]
    round_ms, is_long = sum(calls_ms), max(calls_ms) > policy.long_step_s * 1e3
    n_warmup = 1 if is_long else 1 + _warm_up(rounds, round_ms, policy)
    synchronize(device)
    began, origin = time.perf_counter(), mark(device)
    taken = rounds(policy.long_rounds(round_ms / 1e3)) if is_long else _sample(rounds, policy)
    return _measurements(taken, origin, began, start, n_warmup, launches_per_call)


def measure_latency(
    contenders: Sequence[Sequence[Call]], device: torch.device, policy: Latency
) -> list[Measurement]:
    """Times single calls of several contenders in rounds, one call of each a round.

    It differs from `measure_interleaved`: before each call, outside its marks, the L2 cache is
    overwritten, and nothing is captured or repeated. The host launches the call while the device
    overwrites the cache. So a sample has the launch's time on the device, and the host's time only
    if launching takes longer than overwriting.
    """
    if not contenders:
        return []
    start = time.perf_counter()
    rounds = partial(_rounds, _turns(contenders), len(contenders), device)
    flush = _flush(device, policy.flushed_caches)
    rounds(policy.warmup_calls, flush)
    began, origin = time.perf_counter(), mark(device)
    taken = rounds(policy.launches, flush)
    return _measurements(taken, origin, began, start, policy.warmup_calls, 1)


def _flush(device: torch.device, caches: int) -> Call:
    """Returns a function that overwrites the L2 cache and more. On a CPU it does nothing."""
    if device.type != "cuda":
        return lambda: None
    size = caches * torch.cuda.get_device_properties(device).L2_cache_size
    return torch.empty(size, dtype=torch.int8, device=device).zero_


def _measurements(
    taken: list[Spans],
    origin: Mark,
    began: float,
    start: float,
    n_warmup: int,
    launches_per_call: int,
) -> list[Measurement]:
    """Returns each contender's measurement from its marks. Warm-up began at `start`."""
    ended = time.perf_counter()
    has_settled = settled(
        [sum(elapsed_ms(*span) for span in one) for one in zip(*taken, strict=True)]
    )
    return [
        Measurement(
            samples_ms=[elapsed_ms(*span) / launches_per_call for span in spans],
            ended_s=[elapsed_ms(origin, end) / 1e3 for _, end in spans],
            n_launches=launches_per_call,
            n_warmup=n_warmup,
            settled=has_settled,
            began=began,
            wall_s=ended - began,
            measure_s=ended - start,
        )
        for spans in taken
    ]


def _turns(contenders: Sequence[Sequence[Call]]) -> Iterator[tuple[int, Call]]:
    """Yields a contender and its call, round after round. One count picks the inputs of all."""
    turns, order = itertools.count(), list(range(len(contenders)))
    while True:
        random.shuffle(order)
        for contender in order:
            calls = contenders[contender]
            yield contender, calls[next(turns) % len(calls)]


def _rounds(
    turns: Iterator[tuple[int, Call]],
    n_contenders: int,
    device: torch.device,
    n_rounds: int,
    before: Call = lambda: None,
) -> list[Spans]:
    """Calls each contender `n_rounds` times, and `before` ahead of each call. Returns the marks."""
    spans: list[Spans] = [[] for _ in range(n_contenders)]
    for contender, call in itertools.islice(turns, n_rounds * n_contenders):
        before()
        start = mark(device)
        call()
        spans[contender].append((start, mark(device)))
    synchronize(device)
    return spans


def _sample(rounds: Rounds, policy: Policy) -> list[Spans]:
    """Takes `min_samples` samples of each contender, and doubles them until all means are known."""
    start = time.perf_counter()
    taken = rounds(policy.min_samples)
    while True:
        elapsed_s, n_rounds = time.perf_counter() - start, len(taken[0])
        known = all(half_width([elapsed_ms(*span) for span in spans]) <= policy.half_width
                    for spans in taken)  # fmt: skip
        if known or elapsed_s >= policy.max_sampling_s:
            return taken
        affordable = math.ceil(n_rounds * (policy.max_sampling_s / elapsed_s - 1))
        for spans, others in zip(taken, rounds(min(n_rounds, affordable)), strict=True):
            spans += others


def settled(rounds_ms: Sequence[float]) -> bool:
    """Returns whether the times of whole rounds stayed as they were when sampling began."""
    third = max(1, len(rounds_ms) // 3)
    first, last = statistics.median(rounds_ms[:third]), statistics.median(rounds_ms[-third:])
    return abs(math.log(last / first)) < SETTLED_WITHIN


def half_width(samples: Sequence[float]) -> float:
    """Returns half the width of the mean's 95 % interval, as a share of the mean."""
    if len(samples) < N_BATCHES:
        return math.inf
    size = len(samples) // N_BATCHES
    means = [statistics.fmean(samples[i * size : (i + 1) * size]) for i in range(N_BATCHES)]
    deviation = statistics.stdev(means) / math.sqrt(N_BATCHES)
    return T_QUANTILE * deviation / statistics.fmean(means)


def _warm_up(rounds: Rounds, round_ms: float, policy: Policy) -> int:
    """Runs until all times are stable, or for too long. Returns the number of rounds."""
    least, most = CHUNK_CALLS
    chunk = min(max(round(policy.warmup_s * 250 / max(round_ms, 1e-3)), least), most)
    start = time.perf_counter()

    def medians() -> list[float]:
        taken = rounds(chunk)
        return [statistics.median(elapsed_ms(*span) for span in spans) for spans in taken]

    n_rounds, latest = chunk, medians()
    while True:
        previous, latest = latest, medians()
        n_rounds += chunk
        elapsed = time.perf_counter() - start
        is_warm = all(
            abs(after / before - 1) <= WARM_WITHIN
            for before, after in zip(previous, latest, strict=True)
        )
        if elapsed >= policy.warmup_s * (1 if is_warm else WARMUP_LIMIT):
            return n_rounds
