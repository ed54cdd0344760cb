"""Says what is wrong with config.yaml, in one sentence, before any work starts."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

import jsonschema
import yaml

from tnp.bench.sizes import OPERATOR_SIZES
from tnp.gates import GATES
from tnp.ops import registry
from tnp.variants import OPERATORS
from workflow.plan import ABLATION

SCHEMA = Path(__file__).parent / "schemas" / "config.schema.yaml"


def validate(config: dict) -> None:
    """Raises ValueError naming the place in `config`, the value, and what would be right."""
    _check_schema(config)
    _check_names(config)


def _check_schema(config: dict) -> None:
    schema = yaml.safe_load(SCHEMA.read_text())
    validator = jsonschema.Draft202012Validator(schema)
    error = jsonschema.exceptions.best_match(validator.iter_errors(config))
    if error is None:
        return
    if error.validator == "additionalProperties":
        known = list(error.schema["properties"])
        for key in error.instance:
            if key not in known:
                raise ValueError(f"{_place(error.path)}: {_unknown('key', key, known)}")
    limit, wanted = error.validator_value, None
    match error.validator:
        case "minimum":
            wanted = f"must be at least {limit}"
        case "exclusiveMinimum":
            wanted = f"must be larger than {limit}"
        case "type" if limit == "number" and re.fullmatch(r"\d+e-?\d+", str(error.instance)):
            wanted = "is text to YAML, which wants a point in it: write 3e-4 as 3.0e-4"
        case "type":
            wanted = f"must be of type {limit}"
        case "enum":
            wanted = f"must be one of {_listed(limit)}"
        case "pattern" if "propertyNames" in error.absolute_schema_path:
            wanted = "must be a name of small letters, digits and single underscores"
        case "pattern":
            wanted = f"must be {error.schema['description']}"
    what = f"{error.instance!r} {wanted}" if wanted else error.message
    raise ValueError(f"{_place(error.path)}: {what}")


def _check_names(config: dict) -> None:
    """What a schema cannot say: names defined in one place must exist in the other."""
    shapes, variants = config["shapes"], config["variants"]
    _check("gates", "gate", config["gates"], GATES)
    _check_model("model", config["model"])
    for name, spec in variants.items():
        for op in set(OPERATORS) & set(spec):
            _check(f"variants.{name}.{op}", "implementation", [spec[op]], registry.names(op))
        _check_storage(f"variants.{name}", spec, config["model"])
        if name.startswith(("only_", "without_")):
            raise ValueError(
                f"config.yaml: variants.{name}: names that start with only_ or without_ are the "
                "ablation's: rename the variant"
            )
    for name, study in config["steps"].items():
        _check(f"steps.{name}.shapes", "shape", study["shapes"], shapes)
        _check(f"steps.{name}.variants", "variant", study["variants"], variants)
    operators = {name: study for name, study in config["ops"].items() if name != "ceilings"}
    _check("ops", "operator", operators, OPERATOR_SIZES)
    for name, study in operators.items():
        known = registry.names(name)
        _check(f"ops.{name}.shapes", "shape", study["shapes"], shapes)
        _check(f"ops.{name}.implementations", "implementation", study["implementations"], known)
        _check_storage(f"ops.{name}", study, config["model"])
    if "ablation" in config:
        _check_ablation(config["ablation"], shapes, variants)
    for name in {ABLATION} & set(config["steps"]):
        raise ValueError(f"config.yaml: steps.{name}: that is section ablation: rename the study")
    for name in set(config["steps"]) & set(config["ops"]):
        raise ValueError(f"config.yaml: steps.{name} and ops.{name} share a name: rename the study")
    for name, run in config["training"].items():
        _check(f"training.{name}.shape", "shape", [run["shape"]], shapes)
        _check(f"training.{name}.variant", "variant", [run["variant"]], variants)
        _check_model(f"training.{name}.model", run.get("model", config["model"]))
        if run["warmup_steps"] > run["steps"]:
            raise ValueError(
                f"config.yaml: training.{name}.warmup_steps: {run['warmup_steps']} must be at most "
                f"steps, {run['steps']}"
            )


def _check_ablation(spec: dict, shapes: dict, variants: dict) -> None:
    _check("ablation.shapes", "shape", spec["shapes"], shapes)
    for end in ("base", "full"):
        _check(f"ablation.{end}", "variant", [spec[end]], variants)
    base, full = variants[spec["base"]], variants[spec["full"]]
    differing = [key for key in base | full if base.get(key) != full.get(key)]
    _check("ablation.components", "difference of base and full", spec["components"], differing)
    if not spec["base"].startswith("sdpa_") or spec["full"].startswith("sdpa_"):
        raise ValueError(
            f"config.yaml: ablation: base {spec['base']!r} and full {spec['full']!r} must be one "
            "of PyTorch's variants (sdpa_…) and one of ours"
        )


def _check_storage(place: str, spec: dict, model: dict) -> None:
    storage, d_ff = spec.get("d_ff_storage"), model["d_ff"]
    if storage is not None and storage < d_ff:
        raise ValueError(
            f"config.yaml: {place}.d_ff_storage: {storage} is smaller than the model's "
            f"d_ff: it must be at least {d_ff}"
        )


def _check_model(place: str, model: dict) -> None:
    if model["d_model"] % model["n_heads"]:
        raise ValueError(
            f"config.yaml: {place}: d_model {model['d_model']} must be a multiple of "
            f"n_heads {model['n_heads']}"
        )


def _check(place: str, kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"config.yaml: {place}: {_unknown(kind, name, known)}")


def _place(path: Iterable[str | int]) -> str:
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return f"config.yaml: {place[1:]}" if place else "config.yaml"


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    close = get_close_matches(str(name), list(known), n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"choose from {_listed(known)}"
    return f"unknown {kind} {name!r}: {hint}"


def _listed(values: Iterable) -> str:
    return ", ".join(map(str, values))
