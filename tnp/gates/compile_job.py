"""Compiles one Triton kernel for one target."""

import io
import json
import re
import time
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Any

from tnp.dispatch import devices

# Compute capability → target.
TARGETS = {80: "sm_80", 86: "sm_86", 89: "sm_89", 90: "sm_90a", 100: "sm_100a"}

# `ptxas -v` prints resources, and warns of wgmma that wait for one another (C7508 …).
RESOURCES = re.compile(r"(\d+) bytes stack frame.*?Used (\d+) registers", re.DOTALL)
WARNING = re.compile(r"^.*(?:\(C75\d\d\)|\bwarning\b).*$", re.MULTILINE | re.IGNORECASE)


@dataclass
class Job:
    """Holds one kernel to compile, and the implementations that launch it, as (operator, name)."""

    source: Any
    target: Any
    options: dict[str, Any]
    dtype: str
    users: set[tuple[str, str]] = field(default_factory=set)

    @property
    def name(self) -> str:
        return self.source.fn.__name__.strip("_").removesuffix("_kernel")

    @property
    def package(self) -> str:
        """Names the package whose file keeps the result; see `tnp.gates.kept`."""
        return self.source.fn.fn.__module__.split(".")[0]

    @property
    def launch_config(self) -> dict[str, Any]:
        names = {(p.num,): p.name for p in self.source.fn.params if p.is_constexpr}
        constants = {names[at]: x for at, x in self.source.constants.items() if at in names}
        return constants | {name: self.options[name] for name in ("num_warps", "num_stages")}

    def known(self) -> dict:
        """Returns the columns of a row of table `kernels` that need no compiler, and two others."""
        return {
            "kernel": self.name,
            "target": TARGETS[self.target.arch],
            "dtype": self.dtype,
            "launch_config": json.dumps(self.launch_config, default=str),
            "shared_limit_bytes": devices.of_capability(self.target.arch).shared_bytes,
            "num_stages": self.options["num_stages"],
            "users": sorted(self.users),
            "package": self.package,
        }

    def compiled(self) -> dict:
        """Compiles the kernel and returns the other columns. The process must log ptxas."""
        import triton

        start = time.perf_counter()
        with redirect_stdout(io.StringIO()) as log:
            kernel = triton.compile(self.source, target=self.target, options=self.options)
        compile_s = time.perf_counter() - start
        functions = RESOURCES.findall(log.getvalue())
        if not functions:
            raise RuntimeError(f"ptxas said nothing: {log.getvalue()!r}")
        return {
            "registers": max(int(registers) for _, registers in functions),
            "spill_bytes": max(int(stack) for stack, _ in functions),
            "shared_bytes": kernel.metadata.shared,
            "num_warps": kernel.metadata.num_warps,
            "compile_s": compile_s,
            "warnings": "\n".join(dict.fromkeys(WARNING.findall(log.getvalue()))),
        }
