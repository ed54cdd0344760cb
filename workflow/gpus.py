"""Spreads the jobs over the GPUs of one host: key `gpus` of config.yaml.

Ratios of steps come from runs on one GPU without a long gap (view `sessions`), so all jobs of a
shape run on one GPU. A job without a shape is compared with nothing outside itself.
"""

import os
import zlib
from collections.abc import Iterable, Mapping

import pynvml

from tnp.dispatch import devices


def several(n: int, device: str, is_local: bool) -> list[str]:
    """Returns what CUDA_VISIBLE_DEVICES calls each of the first `n` visible GPUs; none for one.

    Args:
        n: key `gpus`.
        device: "cuda" or "cpu".
        is_local: whether the jobs run on this machine.

    Raises:
        ValueError: there are fewer, they are not all of one model, or the jobs run elsewhere.
    """
    if n == 1:
        return []
    if device == "cpu":
        raise ValueError(f"config.yaml: gpus: {n}, but the device is the CPU: leave the key out")
    if not is_local:
        raise ValueError(f"config.yaml: gpus: {n} is for one host: a cluster has --jobs")
    names = _visible()
    if len(names) < n:
        raise ValueError(f"config.yaml: gpus: {n}, but {len(names)} can be seen: use at most that")
    first, *others = dict(list(names.items())[:n]).items()
    for gpu, model in others:
        if model != first[1]:
            raise ValueError(
                f"config.yaml: gpus: {n}, but GPU {gpu} is a {model} and GPU {first[0]} a "
                f"{first[1]}: name GPUs of one model in CUDA_VISIBLE_DEVICES"
            )
    return list(names)[:n]


def _visible() -> dict[str, str]:
    """Returns index or UUID → slug of each GPU that CUDA would see, in CUDA's order."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        every = map(str, range(pynvml.nvmlDeviceGetCount()))
        named = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(every))
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


def gpu_of(name: str, job: Mapping, shapes: Iterable[str], n: int) -> int:
    """Returns the number of the GPU, below `n`, that a job runs on; the same in every run.

    Args:
        name: the job's id, or a gate's name.
        job: its parameters; empty for a gate.
        shapes: the names of section `shapes`, in their order.
        n: number of GPUs.
    """
    places = {shape: place for place, shape in enumerate(shapes)}
    return places.get(job.get("shape"), zlib.crc32(name.encode())) % n
