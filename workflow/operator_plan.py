"""From config.yaml to the jobs that run operators alone: benchmarks, trials of tuning, profiles.

As in `workflow.plan`: {readable id: parameters}, by the configuration and the device alone.
"""

from collections.abc import Mapping
from itertools import product
from types import MappingProxyType

from tnp.bench.outcome import op_job, twins
from tnp.bench.policy import LATENCY, THROUGHPUT, question
from tnp.dispatch.registry import AUTO, catalog, is_automatic
from tnp.dispatch.spec import OWN
from tnp.dispatch.tuned_tables import operations
from tnp.store.schemas import CEILINGS, FORMATS
from workflow import problems

# The studies that sections of config.yaml stand for.
NOISE = "noise"
PROFILES = "profiles"
TUNING = "tuning"


def timing(config: dict, spec: Mapping = MappingProxyType({})) -> dict:
    """How an entry of `ops`, or anything else, is timed: by section `timing`, and its own words.

    The numbers of calls by which latency is measured are of no other question.
    """
    own = spec.get("timing", {})
    if own == LATENCY:
        return config["timing"]
    return {name: value for name, value in config["timing"].items() if name != LATENCY} | own


def ops(config: dict, device: str, slug: str) -> dict[str, dict]:
    """Operator benchmarks, all implementations of a shape in one, and the device's ceilings.

    `implementations` is {contender: config_id of its rows}. One contender stands in each benchmark
    twice, and in study `noise` each is alone with its copies: what equal things differ by.
    """
    common = {
        "timing": timing(config),
        "device": device,
        "device_slug": slug,
    }
    configurations = {}
    dtype = config["compute_dtype"][device]
    for study, spec in on_device(device, config["ops"]).items():
        if study == "ceilings":
            formats = FORMATS if device == "cuda" else ()
            asked = [(ceiling, dtype) for ceiling in CEILINGS]
            asked += [("ceiling_matmul", name) for name in formats if name != dtype]
            for ceiling, number in asked:
                mark = "" if number == dtype else f"_{number}"
                config_id = f"ceilings--{ceiling.removeprefix('ceiling_')}{mark}"
                configurations[config_id] = {
                    "config_id": config_id,
                    "op": ceiling,
                    "implementations": {"torch": config_id},
                    "dtype": number,
                    **of_study(study, spec),
                    **common,
                }
            continue
        op = problems.operator_of(study, spec)
        names = problems.implementations(op, spec)
        contenders = [*names, *twins(_twice(op, names), 1)]
        about = common | of_study(study, spec) | {"timing": timing(config, spec)}
        for named in problems.of_operator(config, op, spec, spec.get("dtype", dtype)):
            config_id = f"{study}--{named.shape.replace('/', '-')}"
            configurations[config_id] = _op_job(config_id, named, contenders, about)
    noise = config.get("noise", {"devices": []})
    for op, spec in noise["ops"].items() if device in noise["devices"] else ():
        of_op = problems.of_operator(config, op, spec, dtype)
        for named, name in product(of_op, spec["implementations"]):
            config_id = f"{NOISE}--{op}--{named.shape}--{name}"
            copies = [name, *twins(name, noise["copies"] - 1)]
            study = of_study(NOISE, noise) | common
            configurations[config_id] = _op_job(config_id, named, copies, study)
    return configurations


def tuning(config: dict, device: str, slug: str) -> dict[str, dict]:
    """Trials of our kernels, on demand: a job an operation, at each shape of section `tuning`.

    An operation that several implementations share is tuned once. Which trials there are is known
    in the process that measures them. None without a GPU.
    """
    configurations = {}
    spec = config.get(TUNING) if device == "cuda" else None
    for op in spec["operators"] if spec else ():
        for named in problems.of_operator(config, op, spec, config["compute_dtype"][device]):
            for operation, (name, pass_) in operations(catalog().operator(op)).items():
                part = operation.removeprefix(f"{op}.").replace(".", "-")
                config_id = f"{TUNING}--{op}--{named.shape}--{part}"
                study = {"study": TUNING, "replicates": 1, "priority": 1}
                study |= {"timing": timing(config), "device": device, "device_slug": slug}
                trials = {"forced": {name: {}}, "passes": [pass_]}
                configurations[config_id] = _op_job(config_id, named, [name], study | trials)
    return configurations


def deciding(config: dict, ops: dict[str, dict]) -> list[tuple[str, int]]:
    """(id, replicate) of those operator benchmarks by which implementations are chosen.

    `ops` are the benchmarks of this device; those with "auto" at a shape of section `tuning` count,
    and the other shapes tell how good the choice is where nothing was tuned.
    """
    shapes = config.get(TUNING, {"shapes": []})["shapes"]
    return [
        (config_id, replicate)
        for config_id, parameters in ops.items()
        if parameters.get("shape") in shapes
        and parameters["study"] != NOISE
        and question(parameters["timing"]) == THROUGHPUT
        and AUTO in parameters["implementations"]
        for replicate in range(1, parameters["replicates"] + 1)
    ]


def profiles(config: dict, device: str, slug: str) -> dict[str, dict]:
    """Profiles of section `profiles`, a job an implementation of a problem."""
    section = config.get(PROFILES, {"devices": []})
    configurations = {}
    for entry, spec in section["ops"].items() if device in section["devices"] else ():
        op = problems.operator_of(entry, spec)
        study = of_study(PROFILES, section) | {"sections": section["sections"]}
        study |= {"timing": timing(config), "device": device, "device_slug": slug}
        of_op = problems.of_operator(config, op, spec, config["compute_dtype"][device])
        for named, name in product(of_op, problems.implementations(op, spec)):
            shape = named.shape.replace("/", "-")
            config_id = f"{PROFILES}--{entry}--{shape}--{name}"
            configurations[config_id] = _op_job(
                config_id, named, [name], study | {"implementation": name}
            )
    return configurations


def _op_job(config_id: str, named: problems.Named, contenders: list[str], study: dict) -> dict:
    columns = {"shape": named.shape} | named.columns | study
    return op_job(named.problem, contenders, config_id, named.draw, **columns)


def of_study(name: str, spec: dict) -> dict:
    return {"study": name, "replicates": spec["replicates"], "priority": spec["priority"]}


def _twice(op: str, implementations: list[str]) -> str:
    """Who stands in an operator's benchmark twice: the last of ours, or the last."""
    named = [name for name in implementations if not is_automatic(name)]
    ours = [name for name in named if catalog().role(op, name) == OWN]
    return [*implementations, *ours][-1]


def on_device(device: str, studies: dict[str, dict]) -> dict[str, dict]:
    return {name: spec for name, spec in studies.items() if device in spec["devices"]}
