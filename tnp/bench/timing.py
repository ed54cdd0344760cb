"""Timing: warm until settled, then a pair of marks around every call.

A mark is a CUDA event on the current stream, or a reading of the host clock on the CPU. Events
bound what the device did between them, launch gaps included, so the samples of a loop add up to
its wall time. The host waits for the device between rounds of samples, never inside one, as it
would not in training.
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

# Warm-up has settled when the medians of two successive chunks agree within this share …
WARM_WITHIN = 0.02
# … and gives up after this many times the least warm-up.
WARMUP_LIMIT = 3
CHUNK_CALLS = (3, 100)

# Rounds have settled when the medians of their first and last third agree within this share. What
# a contender's own samples say is drowned in noise: they vary by 4 % at an H200's power limit.
SETTLED_WITHIN = 0.01
# Successive samples are alike, so that their own spread says little of their mean's. Means of ten
# batches are nearly independent; 2.26 is Student's 97.5 % quantile of 9 degrees of freedom.
N_BATCHES, T_QUANTILE = 10, 2.26

Mark = torch.cuda.Event | float
Call = Callable[[], object]
Spans = list[tuple[Mark, Mark]]  # of one contender, in the order taken
Rounds = Callable[[int], list[Spans]]  # takes so many rounds of all contenders


@dataclass(frozen=True)
class Measurement:
    """Raw samples in milliseconds, in the order taken, and how they came about.

    A sample is the mean of `n_launches`. It ended `ended_s` seconds after sampling began, which was
    at `began` on the host's `time.perf_counter`.
    """

    samples_ms: list[float]
    ended_s: list[float]
    n_launches: int
    n_warmup: int
    settled: bool
    began: float
    measure_s: float

    def of_each(self, n: int) -> "Measurement":
        """Of launches that each do n times what is timed."""
        samples = [sample / n for sample in self.samples_ms]
        return replace(self, samples_ms=samples, n_launches=n * self.n_launches)

    @property
    def note(self) -> str | None:
        if self.settled:
            return None
        return f"the first and the last third of the rounds are {SETTLED_WITHIN:.0%} or more apart"


def mark(device: torch.device) -> Mark:
    """Returns a point in time on the device's own clock."""
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


def call_ms(call: Call, device: torch.device) -> float:
    """Milliseconds of one call."""
    start = mark(device)
    call()
    end = mark(device)
    synchronize(device)
    return elapsed_ms(start, end)


def first_call(call: Call, device: torch.device) -> float:
    """Seconds of the first call: kernels compile, libraries pick algorithms, memory is reserved."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def measure(calls: Sequence[Call], device: torch.device, policy: Policy) -> Measurement:
    """Time `calls` in rotation, each of which has run before."""
    (measurement,) = measure_interleaved([calls], device, policy)
    return measurement


def measure_interleaved(
    contenders: Sequence[Sequence[Call]],
    device: torch.device,
    policy: Policy,
    launches_per_call: int = 1,
) -> list[Measurement]:
    """Time several contenders in rounds, one call of each a round, so that drift hits all alike.

    Every call has run before. The order in a round is drawn anew, so that nobody always follows the
    same one. Each call takes the next of its contender's inputs, so that none finds in cache what
    the one before it read. Warm-up ends when every contender has settled. Where a call is longer
    than `policy.long_step_s`, one round is the warm-up. Samples are per launch.
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
    """Time single calls of several contenders in rounds, one call of each a round.

    As in `measure_interleaved`, but for this: the L2 cache is overwritten before each call, outside
    its marks, and nothing is captured, repeated or added. While the device does that the host
    launches the call, so that a sample has the launch's own time on the device, and the host's
    where it takes longer to launch than the device to overwrite the cache.
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
    """Overwrites the L2 cache and more; of a CPU, whose caches only the calls themselves fill,
    nothing.
    """
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
    """Of each contender, from the marks of its calls; `start` is when warm-up began."""
    measure_s = time.perf_counter() - start
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
            measure_s=measure_s,
        )
        for spans in taken
    ]


def _turns(contenders: Sequence[Sequence[Call]]) -> Iterator[tuple[int, Call]]:
    """Whose turn it is, and the call, round after round."""
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
    """Marks around the next `n_rounds` calls of each contender, `before` ahead of each."""
    spans: list[Spans] = [[] for _ in range(n_contenders)]
    for contender, call in itertools.islice(turns, n_rounds * n_contenders):
        before()
        start = mark(device)
        call()
        spans[contender].append((start, mark(device)))
    synchronize(device)
    return spans


def _sample(rounds: Rounds, policy: Policy) -> list[Spans]:
    """Returns the least number of samples of each, then as many again until all means are known."""
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
    """Returns whether the times of whole rounds stay what they were when sampling began."""
    third = max(1, len(rounds_ms) // 3)
    first, last = statistics.median(rounds_ms[:third]), statistics.median(rounds_ms[-third:])
    return abs(math.log(last / first)) < SETTLED_WITHIN


def half_width(samples: Sequence[float]) -> float:
    """Of the 95 % interval of the samples' mean, as a share of it, from means of ten batches."""
    if len(samples) < N_BATCHES:
        return math.inf
    size = len(samples) // N_BATCHES
    means = [statistics.fmean(samples[i * size : (i + 1) * size]) for i in range(N_BATCHES)]
    deviation = statistics.stdev(means) / math.sqrt(N_BATCHES)
    return T_QUANTILE * deviation / statistics.fmean(means)


def _warm_up(rounds: Rounds, round_ms: float, policy: Policy) -> int:
    """Run until all have settled, or for too long; returns the number of rounds."""
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
