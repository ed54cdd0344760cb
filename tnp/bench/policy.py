"""Says how long to warm up and how often to sample: `timing` in config.yaml. Imports no torch.

Operators are timed in two ways, which column `timing` names. Throughput is the mean time of a
launch among many; short launches form a CUDA graph. Latency is the time of a single launch, with
the slowest of a thousand.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

THROUGHPUT, LATENCY = "throughput", "latency"
# Seconds without progress until a child is killed that a command or `compare` started.
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Policy:
    """Warms up for at least `warmup_s` seconds and until times are stable, then samples.

    It takes at least `min_samples` samples. More follow while some mean is known less well than
    `half_width`, a share of it, and sampling has lasted less than `max_sampling_s` seconds. A call
    longer than `long_step_s` seconds is warmed up by one run. Then come as many samples as fit into
    `max_sampling_s`, but at least `long_samples` and at most `min_samples`.

    Raises ValueError if a number of samples is below 1.
    """

    warmup_s: float = 2.0
    min_samples: int = 30
    half_width: float = 0.005
    max_sampling_s: float = 6.0
    long_step_s: float = 0.4
    long_samples: int = 3

    def __post_init__(self) -> None:
        for name in ("min_samples", "long_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")

    def long_rounds(self, round_s: float) -> int:
        """Returns the number of rounds for calls longer than `long_step_s`."""
        return max(self.long_samples, min(int(self.max_sampling_s / round_s), self.min_samples))

    @classmethod
    def from_parameters(cls, timing: Mapping) -> "Policy":
        """Returns the policy in config.yaml's `timing`, ignoring its other keys."""
        return cls(**{field.name: timing[field.name] for field in fields(cls)})


@dataclass(frozen=True)
class Latency:
    """Warms up with `warmup_calls` calls, then samples `launches` single calls.

    Each call follows `flushed_caches` overwritings of the L2 cache. See `timing.latency`.
    """

    warmup_calls: int
    launches: int
    flushed_caches: int


def question(timing: Mapping) -> str:
    """Returns how a job is timed: only the timing of latency has latency's numbers."""
    return LATENCY if LATENCY in timing else THROUGHPUT


def policy_of(timing: Mapping) -> Policy | Latency:
    """Returns the policy of a job's `timing`."""
    if question(timing) == LATENCY:
        return Latency(**timing[LATENCY])
    return Policy.from_parameters(timing)
