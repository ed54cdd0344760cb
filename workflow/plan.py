"""From config.yaml to the configurations to run: {readable id: parameters}, replicates aside.

Pure functions of the configuration and the device; the rules turn each entry into jobs.
"""

import hashlib
import json
from itertools import chain, product

from tnp.bench.outcome import JOINT
from tnp.dispatch.registry import catalog
from tnp.dispatch.spec import OWN
from tnp.gates import gates_for, generic_gate
from tnp.model.variants import Variant, named_specs, with_storage
from workflow.operator_plan import NOISE, PROFILES, of_study, on_device, ops, profiles, timing

# The studies that sections of config.yaml stand for, besides those under `steps` and `ops`.
ABLATION = "ablation"
HOST = "host"
# Keys of its `steps` that name variants, and whether those are captured as a CUDA graph.
HOST_FORMS = {"launched": False, "captured": True}
PREDICTIONS = "predictions"
_SECTIONS = (ABLATION, NOISE, HOST, PREDICTIONS, JOINT, PROFILES)
EVERY_OPERATOR = "operators"  # in section `gates`
# Of each component: base with it alone, and full without it.
ABLATION_ENDS = ("only", "without")

# Tables that a job of each kind writes, one file of the same stem in each.
TABLES = {
    "gate": ("gates", "kernels", "code", "environments"),
    "step": ("steps", "samples", "stages", "code", "environments"),
    "op": ("ops", "samples", "code", "environments"),
    "train": ("training", "environments"),
    "host": ("host_calls", "environments"),
    "host_step": ("host_steps", "environments"),
    "prediction": ("predictions", "samples", "code", "environments"),
    "profile": ("profiles", "environments"),
}


def device(wanted: str, found: str) -> str:
    """Slug of the device to measure: `wanted` is config.yaml's `device`, `found` what is here.

    A slug is taken as it is: on a cluster, the jobs find the GPU, not the machine that plans.
    """
    if wanted == "cuda" and found == "cpu":
        raise ValueError("config.yaml: device: 'cuda', but no NVIDIA GPU is visible: use 'auto'")
    return found if wanted in ("auto", "cuda") else wanted


def steps(config: dict, device: str, slug: str) -> dict[str, dict]:
    """Training-step benchmarks of every study that this device takes part in."""
    known = variants(config) | ablation_variants(config)
    configurations = {}
    for study, spec in _studies(config):
        if device not in spec["devices"]:
            continue
        switches = product(spec["shapes"], spec["variants"], spec["checkpoint"], spec["cuda_graph"])
        for shape, variant, checkpoint, cuda_graph in switches:
            marks = ["ckpt"] * checkpoint + ["graph"] * cuda_graph
            config_id = "--".join([study, shape, variant, *marks])
            sizes, variant_spec = config["shapes"][shape], known[variant]
            configurations[config_id] = {
                "config_id": config_id,
                "study": study,
                "shape": shape,
                **sizes,
                "variant": variant,
                "variant_spec": variant_spec,
                "model": config["model"],
                "dtype": config["compute_dtype"][device],
                "checkpoint": checkpoint,
                "cuda_graph": cuda_graph,
                "optimizer": spec.get("optimizer", True),
                "replicates": spec["replicates"],
                "priority": spec["priority"],
                "timing": timing(config),
                "device": device,
                "device_slug": slug,
                **_of_variant(
                    variant, variant_spec, sizes, config["model"], checkpoint, cuda_graph
                ),
            }
    return configurations


def variants(config: dict, model: dict | None = None) -> dict[str, dict]:
    """{name: what it says} of those that come with the package and of the experiment's own.

    Hidden layers are stored as `model` needs it, config's own where None.
    """
    d_ff = (model or config["model"])["d_ff"]
    specs = named_specs() | config.get("variants", {})
    return {name: with_storage(spec, d_ff) for name, spec in specs.items()}


def ablation_variants(config: dict) -> dict[str, dict]:
    """Of each component: base with it alone, `only_…`, and full without it, `without_…`."""
    if "ablation" not in config:
        return {}
    spec = config["ablation"]
    base, full = (variants(config)[spec[end]] for end in ("base", "full"))
    found = {}
    only, without = ABLATION_ENDS
    for component in spec["components"]:
        found[f"{only}_{component}"] = _with(base, component, full)
        found[f"{without}_{component}"] = _with(full, component, base)
    return found


def _with(variant: dict, key: str, other: dict) -> dict:
    """`variant` with what `other` says of `key`, which may be nothing."""
    rest = {name: value for name, value in variant.items() if name != key}
    return rest | ({key: other[key]} if key in other else {})


def _studies(config: dict) -> list[tuple[str, dict]]:
    """Those under `steps`, and the ablation, a part of it a shape."""
    studies = list(config["steps"].items())
    if "ablation" in config:
        spec = config["ablation"]
        common = {name: spec[name] for name in ("devices", "priority")} | {"checkpoint": [False]}
        for shape, run in spec["shapes"].items():
            components = run.get("components", spec["components"])
            ends = [f"{end}_{component}" for component in components for end in ABLATION_ENDS]
            part = {
                "shapes": [shape],
                "variants": [spec["base"], spec["full"], *ends],
                "cuda_graph": [run["cuda_graph"]],
                "replicates": run["replicates"],
            }
            studies.append((ABLATION, common | part))
    return studies


def _of_variant(
    name: str, spec: dict, sizes: dict, model: dict, checkpoint: bool, cuda_graph: bool
) -> dict:
    """The implementations that a variant uses, as JSON, and the gates it waits for, with "|"."""
    variant = Variant.from_spec(name, spec)
    rows = sizes["batch"] * (sizes["n_context"] + sizes["n_target"])
    recompute = variant.recompute_above is not None and rows > variant.recompute_above
    operators, ragged = variant.implementations(), "vary" in sizes or variant.pack
    switches = checkpoint, cuda_graph, variant.skip_unread, recompute, ragged, variant.centred_keys
    gates = gates_for(operators, *switches, buffer="buffer" in model)
    return {"operators": json.dumps(operators), "gates": "|".join(gates)}


def gates(config: dict) -> list[str]:
    """What section `gates` names; "operators" stands for a gate of each implementation of ours."""
    found = []
    for name in config["gates"]:
        found += own_gates() if name == EVERY_OPERATOR else [name]
    return list(dict.fromkeys(found))


def own_gates() -> list[str]:
    """A gate of each implementation of ours, by operator."""
    known = catalog()
    return [
        generic_gate(op, name)
        for op in known.operators
        for name in known.names(op)
        if known.role(op, name) == OWN
    ]


def host(config: dict, device: str, slug: str) -> dict[str, dict]:
    """What eager calls cost the host, a problem a job."""
    section = config.get(HOST, {"devices": []})
    configurations = {}
    for name, spec in section["problems"].items() if device in section["devices"] else ():
        config_id = f"{HOST}--{name}"
        dtype = config["compute_dtype"][device]
        problem = catalog().operator(spec["op"]).problem(dtype, **spec["sizes"])
        asked = {"op": spec["op"], "problem": problem.json}
        configurations[config_id] = {
            "config_id": config_id,
            "problems": [asked | {"implementations": spec["implementations"]}],
            "timing": timing(config),
            "device": device,
            "device_slug": slug,
            **of_study(HOST, section),
        }
    return configurations


def host_steps(config: dict, device: str, slug: str) -> dict[str, dict]:
    """Returns the jobs of whole steps, one a shape. Forms take turns in a job."""
    section = config.get(HOST, {"devices": []})
    if device not in section["devices"] or "steps" not in section:
        return {}
    spec, known = section["steps"], variants(config)
    forms = [
        {"variant": name, "variant_spec": known[name], "cuda_graph": cuda_graph}
        for key, cuda_graph in HOST_FORMS.items()
        for name in spec[key]
    ]
    return {
        (config_id := f"{HOST}--steps--{shape}"): {
            "config_id": config_id,
            "shape": shape,
            **config["shapes"][shape],
            "forms": forms,
            "model": config["model"],
            "dtype": config["compute_dtype"][device],
            "timing": timing(config),
            "device": device,
            "device_slug": slug,
            **of_study(HOST, section | spec),
        }
        for shape in spec["shapes"]
    }


def predictions(config: dict, device: str, slug: str) -> dict[str, dict]:
    """Predictions over one context, and joint samples: a shape and a variant of either study a job.

    The forms of a study take turns in its jobs.
    """
    configurations = {}
    for study in (PREDICTIONS, JOINT):
        section = config.get(study, {"devices": []})
        if device not in section["devices"]:
            continue
        model = config["model"] | ({"buffer": section["buffer"]} if study == JOINT else {})
        for shape, variant in product(section["shapes"], section["variants"]):
            config_id = f"{study}--{shape}--{variant}"
            sizes, variant_spec = config["shapes"][shape], variants(config)[variant]
            configurations[config_id] = {
                "config_id": config_id,
                "shape": shape,
                **sizes,
                "variant": variant,
                "variant_spec": variant_spec,
                "model": model,
                "dtype": config["compute_dtype"][device],
                "timing": timing(config),
                "device": device,
                "device_slug": slug,
                **of_study(study, section),
                # On a GPU some of the forms are captured.
                **_of_variant(variant, variant_spec, sizes, model, False, device == "cuda"),
            }
    return configurations


def training(config: dict, device: str, slug: str) -> dict[str, dict]:
    """Training runs; what a run does not set comes from its shape and from `model`."""
    runs = {}
    for run, spec in on_device(device, config["training"]).items():
        parameters = {
            "config_id": run,
            "run": run,
            **config["shapes"][spec["shape"]],
            "model": config["model"],
            "dtype": config["compute_dtype"][device],
            **{key: value for key, value in spec.items() if key != "devices"},
            "variant_spec": variants(config, spec.get("model"))[spec["variant"]],
            "device": device,
            "device_slug": slug,
        }
        if "vary" in config["shapes"][spec["shape"]]:
            parameters["held_out_vary"] = config["shapes"][spec["shape"]]["vary"]
        variant = (parameters["variant"], parameters["variant_spec"])
        # On a GPU steps of a training run are captured.
        of = *variant, parameters, parameters["model"]
        uses = _of_variant(*of, checkpoint=False, cuda_graph=device == "cuda")
        runs[run] = parameters | uses
    return runs


def running_order(configurations: dict[str, dict]) -> list[tuple[str, int]]:
    """(id, replicate) of every job, by priority of its study, so that a run that is cut off has
    the most valuable rows.

    Of equal priority replicate 1 of all comes first, then 2, each round in an order of its own,
    drawn by hash, so that it is the same when a killed run continues.
    """
    jobs = [
        (config_id, replicate)
        for config_id, parameters in configurations.items()
        for replicate in range(1, parameters["replicates"] + 1)
    ]
    drawn = {job: hashlib.sha256(f"{job[1]} {job[0]}".encode()).hexdigest() for job in jobs}
    return sorted(jobs, key=lambda job: (configurations[job[0]]["priority"], job[1], drawn[job]))


def elsewhere(config: dict, device: str, slug: str) -> dict[str, str]:
    """{study or training run: a sentence that says so} of those that are for other devices."""
    studies = config["steps"] | config["ops"]
    studies |= {name: config[name] for name in _SECTIONS if name in config}
    here = ", ".join([*on_device(device, studies), "gates"])
    found = f"the device is {slug!r}"
    if device == "cpu" and config["device"] == "auto":
        found = "no NVIDIA GPU is visible"
    return {
        name: f"{name!r} is for {' and '.join(spec['devices'])} alone, and {found}: what can be "
        f"run here is {here} and all"
        for name, spec in (studies | config["training"]).items()
        if device not in spec["devices"]
    }


def names(config: dict, device: str, slug: str) -> dict[str, tuple[str, str]]:
    """{id: (kind, name) of a job} of everything that can be measured again on this device."""
    jobs = {name: ("step", name) for name in steps(config, device, slug)}
    for job, parameters in ops(config, device, slug).items():
        jobs |= dict.fromkeys((job, *parameters["implementations"].values()), ("op", job))
    jobs |= {name: ("host", name) for name in host(config, device, slug)}
    jobs |= {name: ("host_step", name) for name in host_steps(config, device, slug)}
    jobs |= {name: ("prediction", name) for name in predictions(config, device, slug)}
    jobs |= {name: ("profile", name) for name in profiles(config, device, slug)}
    jobs |= {name: ("train", name) for name in training(config, device, slug)}
    return jobs | {f"gates--{name}": ("gate", name) for name in gates(config)}


def names_elsewhere(config: dict, device: str, slug: str) -> dict[str, str]:
    """{id: a sentence that says for which device it is} of what only others can measure."""
    sentences = elsewhere(config, device, slug)
    others = (names(config, other, other) for other in config["compute_dtype"] if other != device)
    return {
        name: sentences[study]
        for name in chain.from_iterable(others)
        if (study := name.split("--")[0]) in sentences
    }


def studies(configurations: dict[str, dict]) -> dict[str, list[tuple[str, int]]]:
    """{study: its jobs, (id, replicate)}."""
    jobs: dict[str, list[tuple[str, int]]] = {}
    for config_id, replicate in running_order(configurations):
        jobs.setdefault(configurations[config_id]["study"], []).append((config_id, replicate))
    return jobs


def job(configurations: dict[str, dict], config_id: str, replicate: str) -> dict:
    """Parameters of one job."""
    parameters = dict(configurations[config_id], replicate=int(replicate))
    # What only orders the jobs makes no other job of one.
    return {
        key: value for key, value in parameters.items() if key not in ("replicates", "priority")
    }
