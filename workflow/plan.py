"""From config.yaml to the configurations to run: {readable id: parameters}, replicates aside.

Pure functions of the configuration and the device; the rules turn each entry into jobs.
"""

import hashlib
from itertools import product

from tnp.bench.outcome import CEILINGS

# Tables that a job of each kind writes, one file of the same stem in each.
TABLES = {
    "gate": ("gates", "kernels", "environments"),
    "step": ("steps", "samples", "stages", "environments"),
    "op": ("ops", "samples", "environments"),
    "train": ("training", "environments"),
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
    configurations = {}
    for study, spec in _on(device, config["steps"]).items():
        switches = product(spec["shapes"], spec["variants"], spec["checkpoint"], spec["cuda_graph"])
        for shape, variant, checkpoint, cuda_graph in switches:
            marks = ["ckpt"] * checkpoint + ["graph"] * cuda_graph
            config_id = "--".join([study, shape, variant, *marks])
            configurations[config_id] = {
                "config_id": config_id,
                "study": study,
                "shape": shape,
                **config["shapes"][shape],
                "variant": variant,
                "variant_spec": config["variants"][variant],
                "model": config["model"],
                "dtype": config["compute_dtype"][device],
                "checkpoint": checkpoint,
                "cuda_graph": cuda_graph,
                "optimizer": spec.get("optimizer", True),
                "replicates": spec["replicates"],
                "timing": config["timing"],
                "device": device,
                "device_slug": slug,
            }
    return configurations


def ops(config: dict, device: str, slug: str) -> dict[str, dict]:
    """Operator benchmarks, all implementations of a shape in one, and the device's ceilings.

    `implementations` is {name: config_id of its rows}.
    """
    common = {
        "dtype": config["compute_dtype"][device],
        "timing": config["timing"],
        "device": device,
        "device_slug": slug,
    }
    configurations = {}
    for op, spec in _on(device, config["ops"]).items():
        if op == "ceilings":
            for ceiling in CEILINGS:
                config_id = f"ceilings--{ceiling}"
                configurations[config_id] = {
                    "config_id": config_id,
                    "op": ceiling,
                    "implementations": {"torch": config_id},
                    "replicates": spec["replicates"],
                    **common,
                }
            continue
        for shape in spec["shapes"]:
            config_id = f"{op}--{shape}"
            configurations[config_id] = {
                "config_id": config_id,
                "op": op,
                "implementations": {
                    name: f"{config_id}--{name}" for name in spec["implementations"]
                },
                **attention_sizes(config, shape),
                "replicates": spec["replicates"],
                **common,
            }
    return configurations


def attention_sizes(config: dict, shape: str) -> dict:
    """What attention works on in a step of that shape: every row asks, context rows answer."""
    sizes, model = config["shapes"][shape], config["model"]
    return {
        "shape": shape,
        "batch": sizes["batch"],
        "n_q": sizes["n_context"] + sizes["n_target"],
        "n_k": sizes["n_context"],
        "n_heads": model["n_heads"],
        "head_dim": model["d_model"] // model["n_heads"],
    }


def training(config: dict, device: str, slug: str) -> dict[str, dict]:
    """Training runs; what a run does not set comes from its shape and from `model`."""
    return {
        run: {
            "config_id": run,
            "run": run,
            **config["shapes"][spec["shape"]],
            "model": config["model"],
            "dtype": config["compute_dtype"][device],
            **{key: value for key, value in spec.items() if key != "devices"},
            "variant_spec": config["variants"][spec["variant"]],
            "device": device,
            "device_slug": slug,
        }
        for run, spec in _on(device, config["training"]).items()
    }


def running_order(configurations: dict[str, dict]) -> list[tuple[str, int]]:
    """(id, replicate) of every job: replicate 1 of all, then 2, each round in an order of its own.

    The order is drawn by hash, so that it is the same when a killed run continues.
    """
    jobs = [
        (config_id, replicate)
        for config_id, parameters in configurations.items()
        for replicate in range(1, parameters["replicates"] + 1)
    ]
    drawn = {job: hashlib.sha256(f"{job[1]} {job[0]}".encode()).hexdigest() for job in jobs}
    return sorted(jobs, key=lambda job: (job[1], drawn[job]))


def job(configurations: dict[str, dict], config_id: str, replicate: str) -> dict:
    """Parameters of one job."""
    parameters = dict(configurations[config_id], replicate=int(replicate))
    del parameters["replicates"]
    return parameters


def _on(device: str, studies: dict[str, dict]) -> dict[str, dict]:
    return {name: spec for name, spec in studies.items() if device in spec["devices"]}
