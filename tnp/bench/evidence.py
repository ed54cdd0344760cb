"""What a row carries so that others can judge it: its run, its question's hashes, the code it ran.

Imports no torch: the process that plans, and that records a failure, knows all of it but the
kernels.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib import metadata

from tnp.bench.kernel_code import digest
from tnp.bench.policy import Policy
from tnp.bench.sizes import CEILINGS
from tnp.catalog import AUTO, catalog
from tnp.contract import OWN
from tnp.gates import gates_of
from tnp.ops import registry
from tnp.schemas import OP_KEY, OP_SIZES
from tnp.variants import Variant

# What a step's numbers depend on besides the code: not its names.
STEP_SPEC = (
    *("model", "batch", "n_context", "n_target", "dtype", "variant_spec"),
    *("checkpoint", "cuda_graph", "optimizer"),
)
NAMES = ("config_id", "implementation", "shape", "pass", "replicate")
_SIZES = frozenset(name for name, _ in OP_KEY + OP_SIZES)
OP_SPEC = tuple(name for name, _ in OP_KEY + OP_SIZES if name not in NAMES)


def of_step(parameters: dict) -> dict[str, str | None]:
    """What is known of a step's evidence before it runs."""
    variant = Variant.from_spec(parameters["variant"], parameters["variant_spec"])
    return {
        "spec_hash": _hash({name: parameters[name] for name in STEP_SPEC}),
        "source_hash": _definitions_hash(parameters.get("definitions")),
        "timing_hash": _timing_hash(parameters),
        "role": variant.role(parameters["checkpoint"], parameters["cuda_graph"]),
    }


def of_op(parameters: dict) -> dict[str, object]:
    """The same of one implementation of an operator, `parameters["implementation"]`."""
    if "problem" in parameters:
        return _of_contract(parameters)
    op, name = parameters["op"], parameters["implementation"]
    is_ceiling = op in CEILINGS
    return {
        "spec_hash": _hash({name: parameters.get(name) for name in OP_SPEC}),
        "source_hash": _definitions_hash(parameters.get("definitions", {}).get(name)),
        "timing_hash": _timing_hash(parameters),
        "role": None if is_ceiling else registry.role(op, name),
        "gates": "" if is_ceiling else "|".join(gates_of(op, name)),
    }


def _of_contract(parameters: dict) -> dict[str, object]:
    """Of an implementation of a declared operator. Nothing is imported for it."""
    op, name = parameters["op"], parameters["implementation"]
    operator = catalog().operator(op)
    problem = operator.from_json(parameters["problem"])
    is_auto = name.partition(":")[0] == AUTO
    listed = None if is_auto else catalog().listed(op, name)
    provider = listed.provider if listed else OWN
    rank = listed.rank if listed else None
    forced = parameters.get("forced")
    draw = json.dumps(parameters.get("draw", {}), sort_keys=True)
    sizes = {size: value for size, value in problem.sizes if size in _SIZES}
    return sizes | {
        "spec_hash": _hash([problem.json, draw, forced]),
        "source_hash": _modules_hash(parameters.get("modules", {}).get(name)),
        "timing_hash": _timing_hash(parameters),
        "role": OWN if provider == OWN else "baseline" if rank == 0 else "peer",
        "gates": "|".join(gates_of(op, name)),
        "problem": problem.json,
        "draw": draw,
        "provider": provider,
        "packages": json.dumps(listed.packages if listed else {}, sort_keys=True),
        "rank": rank,
        "precision": listed.own.precision if listed and listed.own else "",
        "with_forward": operator.backward_with_forward,
        "forced": json.dumps(forced) if forced else None,
    }


@dataclass
class Code:
    """What an implementation, a step or a gate ran on: {name: hash} a part."""

    kernels: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    definitions: dict[str, str] = field(default_factory=dict)

    @property
    def kernels_hash(self) -> str:
        return _hash([self.kernels, self.packages])

    def rows(self, implementation: str = "") -> list[dict[str, str]]:
        """Rows of table `code`, without provenance."""
        parts = {
            "kernel": self.kernels,
            "package": self.packages,
            "definition": self.definitions,
        }
        return [
            {"implementation": implementation, "part": part, "name": name, "hash": found}
            for part, content in parts.items()
            for name, found in sorted(content.items())
        ]


def packages(distributions: Iterable[str] = ()) -> dict[str, str]:
    """{name: version} of PyTorch, Triton, cuDNN and those `distributions` that are installed."""
    import torch

    versions = {"torch": torch.__version__}
    if torch.cuda.is_available() and torch.backends.cudnn.version() is not None:
        versions["cudnn"] = str(torch.backends.cudnn.version())
    for name in ("triton", *distributions):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _definitions_hash(definitions: dict[str, str] | None) -> str | None:
    return _hash(definitions) if definitions else None


def _timing_hash(parameters: dict) -> str:
    return _hash(asdict(Policy.from_parameters(parameters["timing"])))


def _hash(content: object) -> str:
    return digest(json.dumps(content, sort_keys=True))
