"""Collects a row's evidence: hashes of its specification and timing, and the code that it ran.

Imports no torch: the process that plans, and records failures, knows all of it but the kernels.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from tnp.bench.language_forms import FORMS
from tnp.bench.policy import policy_of, question
from tnp.dispatch.registry import catalog, is_automatic, version
from tnp.dispatch.spec import OWN
from tnp.experiment.code_hash import digest
from tnp.gates import gates_of
from tnp.model.variants import Variant

# The numbers of predictions and steps depend on these parameters, and on code.
PREDICTION_SPEC = ("model", "batch", "n_context", "n_target", "dtype", "variant_spec")
GENERATION_SPEC = ("model", "form", "weights", "batch", "n_prompt", "n_new", "dtype")
STEP_SPEC = (*PREDICTION_SPEC, "checkpoint", "cuda_graph", "optimizer")


def of_step(parameters: dict) -> dict[str, str | None]:
    """Returns the evidence of a step that is known before it runs."""
    variant = Variant.from_spec(parameters["variant"], parameters["variant_spec"])
    return _known(parameters, parameters.get("definitions")) | {
        "spec_hash": _hash(
            {name: parameters[name] for name in STEP_SPEC}
            | {name: parameters[name] for name in ("vary",) if name in parameters}
        ),
        "role": variant.role(parameters["checkpoint"], parameters["cuda_graph"]),
        "precision": variant.precision,
        "varies": "vary" in parameters,
    }


def of_prediction(parameters: dict) -> dict[str, str | None]:
    """Returns the evidence of predictions that is known before they run."""
    variant = Variant.from_spec(parameters["variant"], parameters["variant_spec"])
    return _known(parameters, parameters.get("definitions")) | {
        "spec_hash": _hash({name: parameters[name] for name in PREDICTION_SPEC}),
        "role": variant.role(),
    }


def of_generation(parameters: dict) -> dict[str, str | None]:
    """Returns the evidence of `parameters["form"]` of a language model, known before it runs."""
    form = FORMS[parameters["form"]]
    return _known(parameters, parameters.get("definitions", {}).get(form.name)) | {
        "spec_hash": _hash({name: parameters[name] for name in GENERATION_SPEC}),
        "role": form.role,
        "operators": json.dumps(form.operators),
        "gates": "|".join(form.gates(parameters["model"])),
    }


def of_op(parameters: dict) -> dict[str, object]:
    """Returns the evidence of `parameters["implementation"]` that is known before it runs.

    It does not import the implementation. A ceiling has neither a problem nor a role.
    """
    op, name = parameters["op"], parameters["implementation"]
    known = _known(parameters, parameters.get("definitions", {}).get(name))
    known["timing"] = question(parameters["timing"])
    if "problem" not in parameters:
        asked = {name: parameters.get(name) for name in ("op", "n_q", "dtype")}
        return known | {"spec_hash": _hash(asked), "gates": ""}
    operator = catalog().operator(op)
    problem = operator.from_json(parameters["problem"])
    listed = None if is_automatic(name) else catalog().listed(op, name)
    forced = parameters.get("forced")
    draw = json.dumps(parameters.get("draw", {}), sort_keys=True)
    return known | {
        "spec_hash": _hash([problem.json, draw, forced]),
        "role": catalog().role(op, name),
        "gates": "|".join(gates_of(op, name)),
        "problem": problem.json,
        "draw": draw,
        "provider": listed.provider if listed else OWN,
        "packages": json.dumps(listed.packages if listed else {}, sort_keys=True),
        "rank": listed.rank if listed else None,
        "precision": listed.own.precision if listed and listed.own else "",
        "with_forward": operator.backward_with_forward,
        "forced": json.dumps(forced) if forced is not None else None,
    }


@dataclass
class Code:
    """Holds the code that a measurement ran: {name: hash} for each part."""

    kernels: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    definitions: dict[str, str] = field(default_factory=dict)

    @property
    def kernels_hash(self) -> str:
        return _hash([self.kernels, self.packages])

    def rows(self, implementation: str = "") -> list[dict[str, str]]:
        """Returns the rows of table `code`, without provenance."""
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
    """Returns {name: version} of PyTorch, Triton, cuDNN and the installed `distributions`."""
    import torch

    versions = {"torch": torch.__version__}
    if torch.cuda.is_available() and torch.backends.cudnn.version() is not None:
        versions["cudnn"] = str(torch.backends.cudnn.version())
    found = {name: version(name) for name in ("triton", *distributions)}
    return versions | {name: known for name, known in found.items() if known is not None}


def _known(parameters: dict, definitions: dict[str, str] | None) -> dict[str, str | None]:
    """Returns the hashes of the code and of the timing policy."""
    return {
        "source_hash": _hash(definitions) if definitions else None,
        "timing_hash": _hash(asdict(policy_of(parameters["timing"]))),
    }


def _hash(content: object) -> str:
    return digest(json.dumps(content, sort_keys=True))[:12]  # recorded rows have 12 digits
