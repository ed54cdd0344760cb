"""Which kernels of Triton and CUDA C++ a piece of work launches, and a hash of what each says.

The hash is that of the definitions which the kernel reaches (`tnp.experiment.code_hash`), so that a
row keeps its proof when a comment is edited. Triton's own cache key holds line numbers, and the
hash of a compiled kernel holds tiles and sizes: both change where the kernel's meaning does not.
"""

import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from typing import Any

from tnp.experiment.code_hash import PACKAGES, fingerprint
from tnp.experiment.fingerprints import installed_hash

# Libraries whose kernels stand in a row's package versions.
LIBRARIES = ("triton", "torch")


@contextmanager
def launches() -> Iterator[dict[str, str]]:
    """Notes {kernel: hash} of every kernel that is launched while the block runs.

    Launches are slower meanwhile: nothing is timed inside. Kernels that `torch.compile` generates
    are not noted, because PyTorch's version and the modules that it compiles determine them.
    """
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    from tnp.dispatch import nvrtc
    from tnp.dispatch.launcher import watched

    noted: dict[str, str] = {}
    originals = {kind: kind.run for kind in (JITFunction, InterpretedFunction)}

    def noting(run: types.FunctionType) -> types.FunctionType:
        def launch(kernel: Any, *arguments: Any, **options: Any) -> Any:
            module, name = kernel.fn.__module__, kernel.fn.__qualname__
            if module.split(".")[0] not in LIBRARIES:
                noted[f"{module}.{name}"] = kernel_hash(module, name)
            return run(kernel, *arguments, **options)

        return launch

    def note_cuda(bound: nvrtc.Bound) -> None:
        module, _, name = bound.source.kernel.partition(":")
        noted[f"{module}.{name}"] = kernel_hash(module, name)

    for kind, run in originals.items():
        kind.run = noting(run)
    try:
        with watched(), nvrtc.watched(note_cuda):
            yield noted
    finally:
        for kind, run in originals.items():
            kind.run = run


@cache
def kernel_hash(module: str, name: str) -> str:
    """Of all that a kernel of ours says; of somebody else's, of its package as it is installed."""
    package = module.split(".")[0]
    if package in PACKAGES:
        return fingerprint([f"{module}:{name.split('.')[0]}"])
    (distribution,) = metadata.packages_distributions().get(package, [package])[:1]
    return installed_hash(distribution)
