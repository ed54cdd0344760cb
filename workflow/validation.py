"""Says what is wrong with the configuration, in one sentence with its line, before any work."""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import jsonschema
import yaml

from tnp.bench.outcome import JOINT
from tnp.dispatch.registry import AUTO, catalog
from tnp.gates import GATES, generic_gates
from tnp.model.variants import FAMILIES, Variant, most_storage, not_in_models
from tnp.tasks.sources import MAX_POINTS
from workflow import problems
from workflow.configuration import Place
from workflow.faults import Fault, listed, not_among, shown, unknown
from workflow.operator_plan import NOISE, PROFILES, TUNING
from workflow.plan import ABLATION, EVERY_OPERATOR, HOST, HOST_FORMS, PREDICTIONS, gates, variants
from workflow.uses import ENDS, of_use, operators, refusals, uses

ROOT = Path(__file__).parents[1]
SCHEMA = ROOT / "workflow" / "schemas" / "config.schema.yaml"
MAX_COUNT = 2**31 - 1  # columns of the store are int32
# The schema's types, in words.
TYPES = {
    "array": "a list",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a finite number",
    "object": "keys with values",
    "string": "text",
}


def validate(config: dict, written: Mapping[Place, str] | None = None) -> None:
    """Raises ValueError naming the line, the place in `config`, the value and what would be right.

    `written` says where values were written (`configuration.places`); without it, in config.yaml.
    """
    fault = _schema_fault(config) or next(_faults(config), None)
    if fault is None:
        return
    place = fault.place + fault.inside
    written = written or {}
    known = (written[place[:n]] for n in range(len(place), 0, -1) if place[:n] in written)
    dotted = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault.place)
    parts = next(known, "config.yaml"), dotted.removeprefix("."), fault.what
    raise ValueError(": ".join(filter(None, parts)))


def _schema_fault(config: dict) -> Fault | None:
    schema = yaml.safe_load(SCHEMA.read_text())
    variant = schema["properties"]["variants"]["additionalProperties"]["properties"]
    variant |= dict.fromkeys(FAMILIES, {"type": "string"})
    error = jsonschema.exceptions.best_match(_VALIDATOR(schema).iter_errors(config))
    if error is None:
        return None
    place, value, limit = tuple(error.path), error.instance, error.validator_value
    if "propertyNames" in error.absolute_schema_path:
        what = "must be a name of at most 48 small letters, digits and single underscores"
        return Fault(place, f"{shown(value)} {what}", (value,))
    match error.validator:
        case "additionalProperties":
            known = error.schema["properties"]
            key = next(key for key in value if key not in known)
            return Fault(place, unknown("key", key, known), (key,))
        case "required":
            key = next(key for key in limit if key not in value)
            return Fault(place, f"key {key!r} is missing")
        case "uniqueItems":
            twice = next(item for item in value if value.count(item) > 1)
            return Fault(place, f"{shown(twice)} stands in it twice")
        case "minimum":
            wanted = f"must be at least {limit}"
        case "maximum":
            wanted = f"must be at most {limit}"
        case "exclusiveMinimum":
            wanted = f"must be larger than {limit}"
        case "minItems" | "minProperties":
            wanted = "must not be empty"
        case "type" if limit == "number" and re.fullmatch(r"\d+e-?\d+", str(value)):
            wanted = "is text to YAML, which wants a point in it: write 3e-4 as 3.0e-4"
        case "type":
            types = [limit] if isinstance(limit, str) else limit
            wanted = f"must be {' or '.join(TYPES[name] for name in types)}"
        case "enum":
            wanted = f"must be one of {listed(map(shown, limit))}"
        case "pattern":
            wanted = f"must be {error.schema['description']}"
        case _:
            return Fault(place, error.message)
    return Fault(place, f"{shown(value)} {wanted}")


def _is_count(checker: jsonschema.TypeChecker, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)  # JSON's 2.0 is an integer


def _is_finite(checker: jsonschema.TypeChecker, value: object) -> bool:
    return _is_count(checker, value) or (isinstance(value, float) and math.isfinite(value))


_VALIDATOR = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine_many(
        {"integer": _is_count, "number": _is_finite}
    ),
)


def _faults(config: dict) -> Iterator[Fault]:
    """What a schema cannot say: names defined in one place must exist in the other."""
    shapes, known, model = config["shapes"], variants(config), config["model"]
    yield from not_among(
        ("gates",), "gate", config["gates"], [*GATES, *generic_gates(), EVERY_OPERATOR]
    )
    yield from _of_model(("model",), model)
    for name, sizes in shapes.items():
        first = next(other for other, its in shapes.items() if its == sizes)
        if first != name:  # rows tell shapes apart by their sizes alone
            yield Fault(("shapes", name), f"has the sizes of shape {first!r}: use {first!r} alone")
        yield from _of_points(("shapes", name), sizes, MAX_COUNT)
        if "vary" in sizes:
            yield from _of_varying_shape(("shapes", name), sizes)
    for name, spec in config.get("variants", {}).items():
        yield from _of_variant(("variants", name), spec, model)
    for name, study in config["steps"].items():
        place = ("steps", name)
        yield from not_among((*place, "shapes"), "shape", study["shapes"], shapes)
        yield from not_among((*place, "variants"), "variant", study["variants"], known)
        for index, variant in enumerate(study["variants"]):
            yield from _of_storage((*place, "variants", index), known[variant], model)
        if name in config["ops"]:
            yield Fault(place, f"a study under ops has the same name, {name!r}: rename one")
    taken = {ABLATION, NOISE, TUNING, HOST, PREDICTIONS, JOINT, PROFILES, *_rules()}
    for place in [(section, name) for section in ("steps", "ops") for name in config[section]]:
        if place[1] in taken:
            yield Fault(place, f"{place[1]!r} is a section or a target already: rename the study")
    for place, op, study in operators(config):
        yield from _of_operator(place, op, study, config)
    for name, spec in config.get(HOST, {"problems": {}})["problems"].items():
        yield from _of_host((HOST, "problems", name), spec, config)
    if "steps" in config.get(HOST, {}):
        yield from _of_host_steps((HOST, "steps"), config[HOST]["steps"], config)
    for section in (PREDICTIONS, JOINT):
        if section in config:
            yield from _of_predictions((section,), config[section], config)
    if "ablation" in config:
        yield from _of_ablation(("ablation",), config["ablation"], shapes, known)
    if TUNING in config:
        yield from _of_tuning((TUNING,), config[TUNING], config)
    for name, run in config["training"].items():
        yield from _of_training(("training", name), run, config)
    named = gates(config)
    for use in uses(config):
        yield from of_use(use, named)


def _rules() -> list[str]:
    """Names of rules, each of which is a target: a study is one too."""
    files = [ROOT / "Snakefile", *ROOT.glob("workflow/rules/*.smk")]
    text = "\n".join(file.read_text() for file in files)
    return re.findall(r"^(?:use )?rule .*?(\w+)(?: with)?:", text, re.MULTILINE)


def _of_model(place: Place, model: dict) -> Iterator[Fault]:
    d_model, n_heads = model["d_model"], model["n_heads"]
    if d_model % n_heads:
        what = f"d_model {d_model} must be a multiple of n_heads {n_heads}"
        yield Fault(place, what, ("n_heads",))


def _of_points(place: Place, sizes: dict, most: int) -> Iterator[Fault]:
    n_context, n_target = sizes["n_context"], sizes["n_target"]
    if n_context + n_target > most:
        yield Fault(
            place,
            f"n_context {n_context} and n_target {n_target} are {n_context + n_target} points: "
            f"they must be at most {most}",
            ("n_context",),
        )


def _of_ranges(place: Place, vary: dict) -> Iterator[Fault]:
    """Of sizes that vary, whoever draws them."""
    for name in ("n_context", "n_target"):
        least, most = vary[name]
        if least > most:
            what = f"[{least}, {most}] must go from the smallest to the largest"
            yield Fault((*place, name), what)
    needed = vary["n_context"][1] + vary["n_target"][0]
    if vary.get("together", needed) < needed:
        what = f"{vary['together']} must be at least {needed}"
        yield Fault((*place, "together"), f"{what}, the largest context and the fewest targets")


def _of_varying_shape(place: Place, sizes: dict) -> Iterator[Fault]:
    """It stands in rows by its means."""
    vary = sizes["vary"]
    if vary.get("log"):
        yield Fault((*place, "vary", "log"), "log is for training runs: a shape has even sizes")
    faults = list(_of_ranges((*place, "vary"), vary))
    yield from faults
    for name in ("n_context", "n_target") if not faults else ():
        least, most = vary[name]
        if name == "n_target":
            most = min(most, vary.get("together", MAX_COUNT) - sizes["n_context"])
        middle = (least + most + 1) // 2
        if sizes[name] != middle:
            what = f"{name} is {sizes[name]}: it must be {middle}, the mean of {least} to {most}"
            yield Fault(place, what, (name,))


def _of_drawn(place: Place, vary: dict, most: int) -> Iterator[Fault]:
    """Of a training run's own sizes, of which none stands in its rows."""
    if vary.get("each", "batch") != "batch":
        what = "sizes of a training run are drawn for each batch: leave `each` out"
        yield Fault((*place, "each"), what)
    yield from _of_ranges(place, vary)
    points = min(vary.get("together", MAX_COUNT), vary["n_context"][1] + vary["n_target"][1])
    if points > most:
        yield Fault(place, f"up to {points} points are drawn: they must be at most {most}")


def _of_variant(place: Place, spec: dict, model: dict) -> Iterator[Fault]:
    if place[-1].startswith(("only_", "without_")):
        what = "names that start with only_ or without_ are the ablation's: rename the variant"
        yield Fault(place, what)
    for family in (family for family in FAMILIES if family in spec):
        known = [AUTO, *_names(family)]
        if spec[family] not in known:
            yield Fault((*place, family), unknown("implementation", spec[family], known))
            continue
        reason = not_in_models(family, spec[family])
        if reason is not None:
            yield Fault((*place, family), f"a variant cannot use {spec[family]!r}: {reason}")
    yield from _of_storage(place, spec, model)
    yield from _of_widest(place, spec, model)


def _of_storage(place: Place, spec: dict, model: dict) -> Iterator[Fault]:
    storage, d_ff = spec.get("d_ff_storage"), model["d_ff"]
    if storage is not None and storage is not True and storage < d_ff:
        yield Fault(
            (*place, "d_ff_storage"),
            f"{storage} is smaller than the model's d_ff: it must be at least {d_ff}",
        )


def _of_widest(place: Place, spec: dict, model: dict) -> Iterator[Fault]:
    storage, most = spec.get("d_ff_storage"), most_storage(model["d_ff"])
    if storage is not None and storage > most:
        what = f"{storage} is wider than the model needs: it must be at most {most}, or true"
        yield Fault((*place, "d_ff_storage"), what)


def _of_buffer(place: Place, name: str, known: dict) -> Iterator[Fault]:
    refusal = Variant.from_spec(name, known[name]).refuses_buffer
    if refusal:
        yield Fault(place, f"{name!r} {refusal}: name a variant that can")


def _of_ablation(place: Place, spec: dict, shapes: dict, known: dict) -> Iterator[Fault]:
    yield from not_among((*place, "shapes"), "shape", spec["shapes"], shapes)
    for end in ENDS:
        if spec[end] not in known:
            yield Fault((*place, end), unknown("variant", spec[end], known))
    base, full = known[spec["base"]], known[spec["full"]]
    differing = [key for key in base | full if base.get(key) != full.get(key)]
    components = (*place, "components")
    yield from not_among(components, "difference of base and full", spec["components"], differing)
    uses_ours = [Variant.from_spec(spec[end], known[spec[end]]).role() == "own" for end in ENDS]
    if uses_ours != [False, True]:
        yield Fault(
            place,
            f"base {spec['base']!r} and full {spec['full']!r} must be a variant of PyTorch's "
            "operators alone and one with operators of ours",
        )


def _of_training(place: Place, run: dict, config: dict) -> Iterator[Fault]:
    shapes, all_variants = config["shapes"], variants(config, run.get("model"))
    for key, known in (("shape", shapes), ("variant", all_variants), ("source", MAX_POINTS)):
        if run[key] not in known:
            yield Fault((*place, key), unknown(key, run[key], known))
    if place[-1] in (*GATES, *generic_gates()):
        yield Fault(place, "a gate has the same name: rename the run")
    model = run.get("model", config["model"])
    yield from _of_model((*place, "model"), model)
    storage = all_variants[run["variant"]].get("d_ff_storage")
    least, most = model["d_ff"], most_storage(model["d_ff"])
    if storage is not None and not least <= storage <= most:
        than = "less than the run's d_ff" if storage < least else "more than the run's d_ff needs"
        yield Fault(
            (*place, "variant"),
            f"{run['variant']!r} has d_ff_storage {storage}, {than}: it must be at least {least} "
            f"and at most {most}",
        )
    if "buffer" in model:
        yield from _of_buffer((*place, "variant"), run["variant"], all_variants)
    most = MAX_POINTS[run["source"]] or MAX_COUNT
    yield from _of_points(place, shapes[run["shape"]] | run, most)
    if "vary" in run:
        yield from _of_drawn((*place, "vary"), run["vary"], most)
    if run["warmup_steps"] > run["steps"]:
        yield Fault(
            (*place, "warmup_steps"),
            f"{run['warmup_steps']} must be at most steps, {run['steps']}",
        )


def _of_tuning(place: Place, spec: dict, config: dict) -> Iterator[Fault]:
    yield from not_among((*place, "shapes"), "shape", spec["shapes"], config["shapes"])
    where = (*place, "operators")
    yield from not_among(where, "operator", spec["operators"], catalog().operators)
    for index, op in enumerate(spec["operators"]):
        try:
            list(problems.of_operator(config, op, spec, config["compute_dtype"]["cuda"]))
        except ValueError as error:
            yield Fault((*where, index), str(error))


def _of_operator(place: Place, op: str, study: dict, config: dict) -> Iterator[Fault]:
    """Of an operator's benchmark: names, and problems that the operator and its gates know."""
    if op not in catalog().operators:
        of, key = (place, "op") if "op" in study else (place[:-1], op)
        yield Fault(of, unknown("operator", op, catalog().operators), (key,))
        return
    known = [*catalog().names(op), AUTO, problems.INSTALLED]
    names = study["implementations"]
    yield from not_among((*place, "implementations"), "implementation", names, known)
    yield from not_among((*place, "shapes"), "shape", study.get("shapes", []), config["shapes"])
    yield from _of_storage(place, study, config["model"])
    if not any(key in study for key in problems.SECTIONS):
        yield Fault(place, f"one of the keys {listed(problems.SECTIONS)} is missing")
    for device in study.get("devices", ["cuda"]):
        try:
            dtype = study.get("dtype", config["compute_dtype"][device])
            of_op = list(problems.of_operator(config, op, study, dtype))
        except ValueError as error:
            yield Fault(place, str(error))
            return
        called = [named.shape for named in of_op]
        for name in sorted({name for name in called if called.count(name) > 1}):
            yield Fault(place, f"two of its problems are called {name!r}: rename one")
        for named in of_op:
            for reason in refusals(op, names, named.problem, device):
                yield Fault(place, f"{named.shape}: {reason}")


def _of_host(place: Place, spec: dict, config: dict) -> Iterator[Fault]:
    if spec["op"] not in catalog().operators:
        yield Fault(place, unknown("operator", spec["op"], catalog().operators), ("op",))
        return
    known = catalog().names(spec["op"])
    names = spec["implementations"]
    yield from not_among((*place, "implementations"), "implementation", names, known)
    try:
        dtype = config["compute_dtype"]["cuda"]
        problem = catalog().operator(spec["op"]).problem(dtype, **spec["sizes"])
    except ValueError as error:
        yield Fault(place, str(error), ("sizes",))
        return
    for reason in refusals(spec["op"], names, problem, "cuda"):
        yield Fault(place, reason)


def _of_host_steps(place: Place, spec: dict, config: dict) -> Iterator[Fault]:
    known = variants(config)
    yield from _of_fixed_shapes(place, spec, config["shapes"])
    for key in HOST_FORMS:
        yield from not_among((*place, key), "variant", spec[key], known)
        for index, name in enumerate(spec[key]):
            yield from _of_storage((*place, key, index), known[name], config["model"])


def _of_fixed_shapes(place: Place, spec: dict, shapes: dict) -> Iterator[Fault]:
    yield from not_among((*place, "shapes"), "shape", spec["shapes"], shapes)
    for index, name in enumerate(spec["shapes"]):
        if "vary" in shapes[name]:
            what = f"the sizes of {name!r} vary: name a shape whose sizes do not"
            yield Fault((*place, "shapes", index), what)


def _of_predictions(place: Place, spec: dict, config: dict) -> Iterator[Fault]:
    known = variants(config)
    yield from _of_fixed_shapes(place, spec, config["shapes"])
    yield from not_among((*place, "variants"), "variant", spec["variants"], known)
    for index, name in enumerate(spec["variants"]):
        here = (*place, "variants", index)
        yield from _of_storage(here, known[name], config["model"])
        if known[name].get("compile"):
            what = f"{name!r} is compiled and predictions are not: name a variant that is not"
            yield Fault(here, what)
        if "buffer" in spec:
            yield from _of_buffer(here, name, known)


def _names(family: str) -> list[str]:
    """Implementations that every operator of a family has."""
    first, *others = catalog().family(family)
    found = catalog().names(first.name)
    return [name for name in found if all(name in catalog().names(one.name) for one in others)]
