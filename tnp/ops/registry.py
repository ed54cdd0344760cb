"""Which implementations of each operator exist, where each can run, and why not.

Importing this module imports neither torch nor triton: the configuration is checked against it
before any work starts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operator.

    `unsupported(device, dtype)` gives the reason it cannot run there, or None. `modules` are the
    modules it lives in: an edit to one of them voids its results. `provider` is "own", "torch", or
    the package that it comes from.
    """

    op: str
    name: str
    modules: tuple[str, ...]
    unsupported: Callable[[torch.device, torch.dtype], str | None]
    provider: str = "torch"


def _anywhere(device: torch.device, dtype: torch.dtype) -> str | None:
    return None


def _half_precision_on_cuda(device: torch.device, dtype: torch.dtype) -> str | None:
    """PyTorch's flash backend: any float dtype on the CPU, 16-bit floats on CUDA."""
    if device.type == "cuda" and dtype.itemsize != 2:
        return f"SDPA's flash backend on CUDA takes bfloat16 or float16, not {dtype}"
    return None


def _cudnn(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"cuDNN needs a CUDA device, not {device.type}"
    if dtype.itemsize != 2:
        return f"SDPA's cuDNN backend takes bfloat16 or float16, not {dtype}"
    import torch

    if torch.cuda.get_device_capability(device) < (8, 0):
        return "SDPA's cuDNN backend needs compute capability 8.0 or newer"
    return None


def _triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """Triton kernels compile for CUDA and run interpreted, for correctness only, on the CPU."""
    import torch
    import triton

    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "the Triton kernels need compute capability 8.0 or newer"
    elif not triton.knobs.runtime.interpret:
        return (
            f"Triton kernels run on CUDA; on {device.type} only in the interpreter, "
            "which TRITON_INTERPRET=1 turns on before triton is imported"
        )
    return None


def _flex(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"flex_attention has a backward on CUDA only, not on {device.type}"
    return _capability(device, (8, 0))


def _fa3(device: torch.device, dtype: torch.dtype) -> str | None:
    """What the wheel holds: code for sm_80 and sm_90a, bfloat16, no float16 and no backward."""
    if device.type != "cuda":
        return f"FlashAttention-3 needs a CUDA device, not {device.type}"
    if str(dtype) != "torch.bfloat16":
        return f"package fa3-fwd is built for bfloat16, not {dtype}"
    return _capability(device, (8, 0), below=(10, 0)) or _package("fa3-fwd")


def _fa4(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"FlashAttention-4 needs a CUDA device, not {device.type}"
    if dtype.itemsize != 2:
        return f"FlashAttention-4 takes bfloat16 or float16, not {dtype}"
    return _capability(device, (9, 0)) or _package("flash-attn-4")


FOR_BENCHMARKS = "it is for benchmarks: choose 'torch' and run the model through torch.compile"


def _compiled(device: torch.device, dtype: torch.dtype) -> str | None:
    """What benchmarks compare with; in a model, torch.compile takes all of it at once."""
    return FOR_BENCHMARKS


def _grouped_mm(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"torch's grouped_mm needs a CUDA device, not {device.type}"
    if str(dtype) != "torch.bfloat16":
        return f"torch's grouped_mm takes bfloat16, not {dtype}"
    return _capability(device, (9, 0))


def _capability(
    device: torch.device, least: tuple[int, int], below: tuple[int, int] = (99, 0)
) -> str | None:
    import torch

    found = torch.cuda.get_device_capability(device)
    if least <= found < below:
        return None
    bound = "{}.{} or newer".format(*least) if found < least else "below {}.{}".format(*below)
    return f"it needs compute capability {bound}, this GPU has {found[0]}.{found[1]}"


def _package(name: str) -> str | None:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"package {name} is not installed: pip install {name}"
    return None


# The kernels of our own implementations, which share them.
OURS = tuple(
    f"tnp.ops.attention.{module}"
    for module in (
        "triton_forward",
        "triton_backward",
        "few_keys",
        "hopper_forward",
        "hopper_backward",
    )
)
# What the feed-forward operators multiply with.
MATMULS = tuple(
    f"tnp.ops.{module}"
    for module in ("operands", "hopper_matmul", "hopper_silu", "triton_matmul", "weight_gradient")
)
MLP = (*MATMULS, "tnp.ops.mlp.composed")
HEADS = tuple(f"tnp.ops.mixture_heads.{name}" for name in ("gradients", "triton_heads", "hopper"))
PROJECTION = ("tnp.ops.weight_gradient", "tnp.ops.projection.products")
# Operators whose plain form PyTorch's compiler would fuse: a baseline of their benchmarks.
COMPILED = ("rms_norm", "mlp", "mixture_heads", "mixture_nll")
HEAD_DIMS = (16, 32, 64, 128)
# What "auto" chooses from (`tnp.ops.auto`), PyTorch's plain form first: all of it can be trained.
CANDIDATES = {
    "attention": ("sdpa_flash", "sdpa_cudnn", "separate", "fused"),
    "embedding": ("torch", "fused"),
    "rms_norm": ("torch", "fused"),
    "projection": ("torch", "fused"),
    "mlp": ("torch", "single", "fused"),
    "mixture_heads": ("torch", "bmm", "fused"),
    "mixture_nll": ("torch", "fused"),
}
_IMPLEMENTATIONS = {
    (implementation.op, implementation.name): implementation
    for implementation in (
        Implementation(
            "attention", "sdpa_flash", ("tnp.ops.attention.torch_forms",), _half_precision_on_cuda
        ),
        Implementation("attention", "sdpa_cudnn", ("tnp.ops.attention.torch_forms",), _cudnn),
        Implementation("attention", "flex", ("tnp.ops.attention.peers",), _flex),
        Implementation("attention", "fa3", ("tnp.ops.attention.peers",), _fa3, "fa3-fwd"),
        Implementation("attention", "fa4", ("tnp.ops.attention.peers",), _fa4, "flash-attn-4"),
        Implementation("attention", "separate", OURS, _triton, "own"),
        Implementation("attention", "fused", OURS, _triton, "own"),
        Implementation("attention", "reference", ("tnp.ops.attention.torch_forms",), _anywhere),
        Implementation("embedding", "torch", (), _anywhere),
        Implementation(
            "embedding", "fused", ("tnp.ops.embedding.triton_embedding",), _triton, "own"
        ),
        Implementation("rms_norm", "torch", (), _anywhere),
        Implementation(
            "rms_norm",
            "fused",
            ("tnp.ops.rms_norm.triton_rms_norm",),
            _triton,
            "own",
        ),
        Implementation("projection", "torch", (), _anywhere),
        Implementation("projection", "fused", PROJECTION, _anywhere, "own"),
        Implementation("mlp", "torch", (), _anywhere),
        Implementation("mlp", "fused", MLP, _triton, "own"),
        # Its backward is that of "fused".
        Implementation("mlp", "single", (*MLP, "tnp.ops.mlp.single"), _triton, "own"),
        Implementation("mixture_heads", "torch", (), _anywhere),
        Implementation("mixture_heads", "loop", (), _anywhere),
        Implementation("mixture_heads", "bmm", (), _anywhere),
        Implementation("mixture_heads", "grouped_mm", (), _grouped_mm),
        Implementation(
            "mixture_heads",
            "fused",
            (*MATMULS, *HEADS),
            _triton,
            "own",
        ),
        Implementation("mixture_nll", "torch", (), _anywhere),
        Implementation(
            "mixture_nll", "fused", ("tnp.ops.mixture_nll.triton_mixture_nll",), _triton, "own"
        ),
        *(Implementation(op, "compiled", (), _compiled) for op in COMPILED),
        *(Implementation(op, "auto", ("tnp.ops.auto",), _anywhere, "own") for op in CANDIDATES),
    )
}


def operators() -> list[str]:
    return list(dict.fromkeys(op for op, _ in _IMPLEMENTATIONS))


def names(op: str) -> list[str]:
    """Implementations of `op`; ValueError for an operator that does not exist."""
    if op not in operators():
        raise ValueError(f"unknown operator {op!r}: choose from {', '.join(operators())}")
    return [name for operator, name in _IMPLEMENTATIONS if operator == op]


def get(op: str, name: str) -> Implementation:
    """The implementation `name` of `op`; ValueError naming what there is."""
    if name not in names(op):
        raise ValueError(
            f"unknown implementation {name!r} of {op}: choose from {', '.join(names(op))}"
        )
    return _IMPLEMENTATIONS[op, name]


def not_in_models(op: str, name: str) -> str | None:
    """Why no model can use the implementation, on whatever device; None where one can."""
    return FOR_BENCHMARKS if get(op, name).unsupported is _compiled else None


def candidates(op: str, name: str) -> tuple[str, ...]:
    """What may run where `name` is asked for: itself, or what "auto" chooses from."""
    return CANDIDATES[op] if name == "auto" else (name,)


def role(op: str, name: str) -> str:
    """The implementation's place in comparisons, one of `tnp.schemas.ROLES`."""
    if get(op, name).provider == "own":
        return "own"
    return "baseline" if name == names(op)[0] else "peer"


def check(op: str, name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raises RuntimeError with the reason where `name` cannot run on this device and dtype."""
    reason = get(op, name).unsupported(device, dtype)
    if reason is not None:
        raise RuntimeError(f"{op} implementation {name!r} cannot run here: {reason}")


# What an implementation takes, of those whose sizes have limits: size → values.
LIMITS: dict[tuple[str, str], dict[str, Collection[int]]] = {
    **{("attention", name): {"head_dim": HEAD_DIMS} for name in names("attention")},
    ("embedding", "fused"): {"width": range(1, 9)},
    ("rms_norm", "fused"): {"d_model": range(1, 16385)},
    ("mlp", "single"): {"d_model": (16, 32, 64, 128, 256, 512)},
    ("mixture_heads", "fused"): {"n_outputs": range(1, 17)},
    ("mixture_nll", "fused"): {"n_components": range(1, 65), "d_y": range(1, 5)},
}
del LIMITS["attention", "reference"]  # which takes every size
