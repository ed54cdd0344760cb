"""Kernels in CUDA C++ for `tnp.gates.compile`: what their launches compile, and what ptxas says."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from tnp.dispatch import nvrtc
from tnp.dispatch.nvrtc import Bound


@dataclass
class CudaJob:
    """One kernel to compile, and the implementations that launch it, as (operator, name)."""

    source: nvrtc.Source
    architecture: str
    threads: int
    dtype: str
    users: set[tuple[str, str]] = field(default_factory=set)

    def known(self) -> dict:
        """Returns the columns of a row of table `kernels` that need no compiler, and `users`."""
        constants = dict(self.source.constants)
        del constants["TYPE"]  # the row's dtype
        return {
            "kernel": self.source.name,
            "target": self.architecture,
            "dtype": self.dtype,
            "launch_config": json.dumps(constants),
            "shared_limit_bytes": nvrtc.SHARED_LIMIT,
            "num_stages": None,  # the source's own
            "users": sorted(self.users),
        }

    def compiled(self) -> dict:
        """Compiles it, and returns the other columns."""
        found = nvrtc.build(self.source, self.architecture)
        warnings = [line for line in found.log.splitlines() if "warning" in line.lower()]
        return {
            **nvrtc.resources(found.log),
            "num_warps": self.threads // nvrtc.WARP,
            "compile_s": found.seconds,
            "warnings": "\n".join(dict.fromkeys(warnings)),
        }


class CudaJobs:
    """Those of the launches that it is told of, once each."""

    def __init__(self) -> None:
        self.found: dict[tuple[nvrtc.Source, str], CudaJob] = {}

    def note(self, bound: Bound, dtype: str, users: tuple[tuple[str, str], ...]) -> None:
        key = bound.source, bound.architecture
        job = self.found.setdefault(key, CudaJob(*key, bound.threads, dtype))
        job.users.update(users)
