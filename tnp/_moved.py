"""Keeps the module names of release 0.2 for one release, each with a DeprecationWarning.

`import tnp.step` gives the module `tnp.train.step`. Release 0.4 drops this file.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

# New package: {old name below `tnp`: new name in the package}.
_MOVED = {
    "tnp.model": {
        "model_config": "config",
        "layers": "layers",
        "prediction": "prediction",
        "decode_graphs": "prediction_graphs",
        "buffer": "causal_buffer",
        "buffered_rows": "buffer_rows",
        "joint": "sampling",
        "drawing": "sample_graph",
        "saved_model": "checkpoint",
        "packing": "packing",
        "buckets": "buckets",
        "variants": "variants",
        "recomputing": "recomputing",
    },
    "tnp.tasks": {
        "normalization": "normalization",
        "task_sources": "sources",
        "units": "units",
    },
    "tnp.train": {
        "step": "step",
        "step_graphs": "step_graphs",
        "training": "loop",
        "warm": "warm",
    },
    "tnp": {
        "captures": "cuda_graphs",
    },
    "tnp.dispatch": {
        "contract": "spec",
        "catalog": "registry",
        "targets": "devices",
        "choice": "tuned_tables",
        "selection": "selection",
        "plans": "plans",
        "opaque": "custom_op",
        "launch": "launcher",
        "cuda": "nvrtc",
        "private": "private",
        "derivatives": "derivatives",
        "autocast": "autocast",
    },
    "tnp.store": {
        "schemas": "schemas",
        "manifest": "manifest",
        "views": "views",
    },
    "tnp.util": {
        "files": "atomic_files",
        "archive": "tensor_archive",
        "commands": "cli",
        "extras": "extras",
        "inputs": "checks",
        "arrays": "arrays",
        "bounded": "bounded",
    },
    "tnp.experiment": {
        "gpu_memory": "gpu_memory",
        "definitions": "code_hash",
        "fingerprints": "fingerprints",
        "bench.kernel_code": "kernel_code",
    },
    "tnp.figures": {
        "report": "report",
        "story": "story",
    },
    "tnp.ops._shared": {
        "values": "random_values",
        "gates.rounding": "rounding_error",
        "ops.casting": "casting",
        "ops.cuda_rows": "cuda_rows",
        "ops.declared": "declared",
        "ops.e4m3": "e4m3",
        "ops.few_rows": "few_rows",
        "ops.hopper_matmul": "hopper_matmul",
        "ops.hopper_primitives": "hopper_primitives",
        "ops.hopper_silu": "hopper_silu",
        "ops.hopper_silu_8bit": "hopper_silu_8bit",
        "ops.hopper_slope": "hopper_slope",
        "ops.losses": "losses",
        "ops.norms": "norms",
        "ops.operands": "operands",
        "ops.primitives": "primitives",
        "ops.ranges": "ranges",
        "ops.rows": "rows",
        "ops.rows_8bit": "rows_8bit",
        "ops.triton_matmul": "triton_matmul",
        "ops.triton_silu_8bit": "triton_silu_8bit",
        "ops.walks": "walks",
        "ops.weight_gradient": "weight_gradient",
    },
    "tnp.tuning": {
        "costs": "fit_costs",
        "tune": "tune",
        "device": "device",
    },
    "tnp.ops.kv_cache": {
        "cache_entry": "append_kernel",
        "paged_cache": "paged",
    },
}
_NEW = {
    f"tnp.{old}": f"{package}.{new}"
    for package, names in _MOVED.items()
    for old, new in names.items()
}


class _Finder(MetaPathFinder, Loader):
    """Finds a module by its old name and hands out the one with the new name."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in _NEW else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = _NEW[spec.name]
        warnings.warn(
            f"{spec.name} is now {new}: tnp 0.4 drops the old name",
            DeprecationWarning,
            stacklevel=2,
        )
        module = importlib.import_module(new)
        self._kept = module.__spec__, module.__loader__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__, module.__loader__ = self._kept  # which importing the old name replaced

    def get_code(self, name: str) -> CodeType | None:
        """Returns what `python -m` runs."""
        new = {"tnp.tune": "tnp.tuning.__main__"}.get(name, _NEW[name])
        spec = importlib.util.find_spec(new)
        return spec.loader.get_code(new)


def install() -> None:
    """Lets Python find modules by their old names, after it has looked for them everywhere else."""
    sys.meta_path.append(_Finder())
