"""Spreads the jobs over the GPUs of one host: key `gpus` of config.yaml.

Ratios of steps come from runs on one GPU without a long gap (view `sessions`), so all jobs of a
shape run on one GPU. A job without a shape is compared with nothing outside itself.
"""

import os
import zlib
from collections.abc import Iterable, Mapping

import pynvml

from tnp.dispatch import devices


def first_visible(n: int, device: str, is_local: bool) -> list[str]:
    """Returns the first `n` entries of CUDA_VISIBLE_DEVICES (indices or UUIDs), or [] if `n` is 1.

    Args:
        n: key `gpus`.
        device: "cuda" or "cpu".
        is_local: whether the jobs run on this machine.

    Raises:
        ValueError: fewer than `n` GPUs are visible, their models differ, the device is the CPU, or
            the jobs run on a cluster.
    """
    if n == 1:
        return []
    if device == "cpu":
        raise ValueError(f"config.yaml: gpus: {n}, but the device is the CPU: leave the key out")
    if not is_local:
        raise ValueError(f"config.yaml: gpus: {n} is for one host: a cluster has --jobs")
    models = _models()
    if len(models) < n:
        raise ValueError(f"config.yaml: gpus: {n}, but {len(models)} can be seen: use at most that")
    visible = list(models)[:n]
    for gpu in visible:
        if models[gpu] != models[visible[0]]:
            raise ValueError(
                f"config.yaml: gpus: {n}, but GPU {gpu} is a {models[gpu]} and GPU {visible[0]} a "
                f"{models[visible[0]]}: name GPUs of one model in CUDA_VISIBLE_DEVICES"
            )
    return visible


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
        raise ValueError(f"config.yaml: gpus: {error} (CUDA_VISIBLE_DEVICES: {named!r})") from None
    finally:
        pynvml.nvmlShutdown()


def _handle(gpu: str):
    if gpu.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(gpu))
    return pynvml.nvmlDeviceGetHandleByUUID(gpu)


def gpu_number(name: str, job: Mapping, shapes: Iterable[str], n: int) -> int:
    """Returns the number of the GPU, below `n`, that a job runs on; the same in every run.

    Args:
        name: the job's id, or a gate's name.
        job: its parameters; empty for a gate.
        shapes: the names of section `shapes`, in their order.
        n: number of GPUs.
    """
    places = {shape: place for place, shape in enumerate(shapes)}
    return places.get(job.get("shape"), zlib.crc32(name.encode())) % n
