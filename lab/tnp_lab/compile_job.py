"""Compiles a kernel in CUDA C++ for `tnp.gates.compile`, and reads ptxas's log."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from tnp.experiment.code_hash import digest
from tnp_lab import nvrtc


@dataclass
class CudaJob:
    """Holds one kernel to compile, and the implementations that launch it, as (operator, name)."""

    source: nvrtc.Source
    architecture: str
    threads: int
    dtype: str
    users: set[tuple[str, str]] = field(default_factory=set)

    @property
    def package(self) -> str:
        """Names the package whose file keeps the result; see `tnp.gates.kept`."""
        return self.source.kernel.split(".")[0]

    def code(self) -> str:
        """Returns a hash, 16 hexadecimal digits, of all that decides the compiled result."""
        return digest(["CUDA C++", *nvrtc.identity(self.source, self.architecture)])

    def known(self) -> dict:
        """Returns columns of table `kernels` that need no compiler, and `users` and `package`."""
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
            "package": self.package,
        }

    def compiled(self) -> dict:
        """Compiles the kernel and returns the other columns."""
        found = nvrtc.build(self.source, self.architecture)
        warnings = [line for line in found.log.splitlines() if "warning" in line.lower()]
        return {
            **nvrtc.resources(found.log, self.source.name),
            "num_warps": self.threads // nvrtc.WARP,
            "compile_s": found.seconds,
            "warnings": "\n".join(dict.fromkeys(warnings)),
        }
