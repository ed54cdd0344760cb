"""Spreads the jobs over the GPUs of one host: key `gpus` of config.yaml.

Ratios of steps come from runs on one GPU without a long gap (view `sessions`), so all steps of a
shape run on one GPU. Any other job is compared with nothing outside itself.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import pynvml

from tnp.dispatch import devices

if TYPE_CHECKING:
    from workflow.plan import Plan


class Part(NamedTuple):
    """Says what a job has of a host: GPU `number` of the first `n`, an equal part of the cores."""

    number: int
    n: int


def part_of(name: str, plan: Plan, n: int) -> Part:
    """Returns the part of a job or of a gate; the same in every run of the configuration."""
    kind, job = plan.found(name)
    if kind == "step":
        return Part(list(plan.config.shapes).index(job["shape"]) % n, n)
    return Part(list(plan.jobs.get(kind, plan.gates)).index(name) % n, n)


def take(part: Part) -> None:
    """Makes this process and its children see one GPU, and run on its part of the cores."""
    os.environ["CUDA_VISIBLE_DEVICES"] = list(_models())[part.number]
    cores = sorted(os.sched_getaffinity(0))
    first, end = (len(cores) * i // part.n for i in (part.number, part.number + 1))
    os.sched_setaffinity(0, cores[first:end])


def check(n: int, n_cores: int, is_local: bool) -> None:
    """Raises ValueError if the first `n` visible GPUs cannot share the work.

    Args:
        n: key `gpus`.
        n_cores: option --cores.
        is_local: whether the jobs run on this machine.
    """
    if n == 1:
        return
    if not is_local:
        raise ValueError(f"gpus is {n}, and for one host alone: a cluster has --jobs")
    models = _models()
    if not models:
        raise ValueError(f"gpus is {n}, but no NVIDIA GPU can be seen: leave it out")
    if len(models) < n:
        raise ValueError(f"gpus is {n}, but {len(models)} GPUs can be seen: use at most that")
    visible = list(models)[:n]
    for gpu in visible:
        if models[gpu] != models[visible[0]]:
            raise ValueError(
                f"gpus is {n}, but GPU {gpu} is a {models[gpu]} and GPU {visible[0]} a "
                f"{models[visible[0]]}: name GPUs of one model in CUDA_VISIBLE_DEVICES"
            )
    if min(n_cores, len(os.sched_getaffinity(0))) < n:
        raise ValueError(f"gpus is {n}, but --cores is {n_cores}: each GPU needs one")


def _models() -> dict[str, str]:
    """Returns index or UUID → slug of each visible GPU, in the order of CUDA_VISIBLE_DEVICES.

    Indices are NVML's. Those of CUDA are equal where all GPUs are of one model.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        if named is None:
            named = ",".join(map(str, range(pynvml.nvmlDeviceGetCount())))
        return {
            gpu: devices.slug(pynvml.nvmlDeviceGetName(_handle(gpu)))
            for gpu in map(str.strip, named.split(","))
            if gpu
        }
    except pynvml.NVMLError as error:
        raise ValueError(f"{error} (CUDA_VISIBLE_DEVICES: {named!r})") from None
    finally:
        pynvml.nvmlShutdown()


def _handle(gpu: str):
    if gpu.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(gpu))
    return pynvml.nvmlDeviceGetHandleByUUID(gpu)
