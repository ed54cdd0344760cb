"""Keeps the module names of release 0.2 for one release, each with a DeprecationWarning.

`import tnp.step` gives the module `tnp.train.step`. Release 0.4 drops this file.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
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
    "tnp_lab": {
        "cuda": "nvrtc",
        "ops.cuda_rows": "cuda_rows",
        "ops.row_sum": "row_sum",
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


# Old module, which is a package now: {its public names: the module that has them now}.
_NAMES = {
    "tnp.dispatch": {"tnp.dispatch.call": ("forget",)},
    "tnp.store": {
        "tnp.store.files": (
            *("all_files", "build_database", "is_current", "read_table", "read_tables"),
            *("record", "write_table"),
        )
    },
    "tnp.train": {"tnp.train.recorded_runs": ("run",)},
    "tnp.tuning": {
        "tnp.dispatch.tuned_tables": ("operations",),
        "tnp.tuning.entries": ("fastest", "of_operations", "of_operators", "time_ms"),
    },
}


class _Finder(MetaPathFinder, Loader):
    """Finds a module by its old name and hands out the one with the new name."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in _NEW else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = _NEW[spec.name]
        _warn(spec.name, new)
        module = importlib.import_module(new)
        self._kept = module.__spec__, module.__loader__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__, module.__loader__ = self._kept  # which importing the old name replaced

    def get_code(self, name: str) -> CodeType | None:
        """Returns what `python -m` runs."""
        new = "tnp.tuning.__main__" if name == "tnp.tune" else _NEW[name]
        _warn(name, new)
        spec = importlib.util.find_spec(new)
        return spec.loader.get_code(new)


def names_of(package: str, other: Callable[[str], object] | None = None) -> Callable[[str], object]:
    """Returns `__getattr__` of a package that was a module: it finds the old names, then `other`'s.

    Args:
        package: the package's `__name__`.
        other: `__getattr__` of the names that the package offers now.
    """
    homes = {name: module for module, names in _NAMES[package].items() for name in names}

    def find(name: str) -> object:
        if name in homes:
            _warn(f"{package}.{name}", f"{homes[name]}.{name}")
            return getattr(importlib.import_module(homes[name]), name)
        if other is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return other(name)

    return find


def _warn(old: str, new: str) -> None:
    text = f"{old} is now {new}: tnp 0.4 drops the old name"
    warnings.warn(text, DeprecationWarning, stacklevel=3)


def install() -> None:
    """Lets Python find modules by their old names, after it has looked for them everywhere else."""
    sys.meta_path.append(_Finder())
