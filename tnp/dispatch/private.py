"""Keeps the private interfaces of Python, PyTorch and Triton on a call's way to a launch.

A new version may move or drop one of them without notice. `tests/dispatch/test_private.py` looks
for each, so that a new version fails there with a clear message. A name of `PLACES` is looked up
when a module first imports it, so triton is imported only where it is needed.

Kernels of Gluon, `tnp.util.checks` and `tnp_lab.launch` name some of them directly: hashes of
recorded results cover that code, and would change.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

Function = TypeVar("Function", bound=Callable)

# Maps our name to the place.
PLACES = {
    # Reads a variable of the environment by its encoded name. `os.environ` encodes it at each
    # look-up.
    "environment": "os:environ._data.get",
    # A plan's key and a call's path depend on these.
    "is_deterministic": "torch._C:_get_deterministic_algorithms",
    "n_dispatch_modes": "torch._C:_len_torch_dispatch_stack",
    "dispatch_modes": "torch.utils._python_dispatch:_get_current_dispatch_mode_stack",
    "in_function_mode": "torch._C:_is_torch_function_mode_enabled",
    # Transforms of torch.func: the innermost open one, all of them, and the one that is harmless.
    "functorch_level": "torch._C:_functorch.peek_interpreter_stack",
    "functorch_levels": "torch._C:_functorch.get_interpreter_stack",
    "FUNCTIONALIZE": "torch._C:_functorch.TransformType.Functionalize",
    "is_batched_tensor": "torch._C:_functorch.is_batchedtensor",
    "is_legacy_batched_tensor": "torch._C:_functorch.is_legacy_batchedtensor",
    "is_wrapped_tensor": "torch._C:_functorch.is_functorch_wrapped_tensor",  # for tnp.util.checks
    "forward_level": "torch.autograd.forward_ad:_current_level",  # see in_forward_mode
    # Hooks that may return other tensors than were saved; called with False.
    "saved_tensors_hooks": "torch._C:_autograd._top_saved_tensors_default_hooks",
    "clear_saved_tensors": "torch._C:_FunctionBase.maybe_clear_saved_tensors",
    "in_autocast": "torch._C:_is_any_autocast_enabled",
    "DisableAutocast": "torch._C:_DisableAutocast",
    # Tells whether the layers of a block have hooks; see has_hooks.
    "has_global_hooks": "torch.nn.modules.module:_has_any_global_hook",
    # Settings of the compiler.
    "donated_buffer": "torch._functorch.config:donated_buffer",  # see keep_buffers
    "recompile_limit": "torch._dynamo.config:recompile_limit",  # see allow_graphs
    "list_mode_options": "torch._inductor:list_mode_options",
    # Triton's structures of Gluon kernels, and its launcher of compiled kernels.
    "aggregate": "triton.language.core:_aggregate",  # for kernels of Gluon
    # Compiles kernels in a pool, and stands for a kernel until it is compiled.
    "AsyncCompileMode": "triton.runtime._async_compile:AsyncCompileMode",
    "FutureKernel": "triton.runtime._async_compile:FutureKernel",
    "CudaLauncher": "triton.backends.nvidia.driver:CudaLauncher",
}
# Only PyTorch for CUDA has these. Elsewhere they are None.
CUDA_PLACES = {
    "current_device": "torch._C:_cuda_getDevice",  # torch.cuda.current_device does more
    "current_stream": "torch._C:_cuda_getCurrentRawStream",  # for tnp_lab.launch
}
# Triton's versions whose launchers take their arguments in an order that `tnp.dispatch.launcher`
# knows.
KNOWN_LAUNCHERS = ((3, 6), (3, 7))
# Element types that Triton's driver numbers differently from device code (its driver.py).
TO_HOST = {8: 10, 9: 8, 10: 9}


def __getattr__(name: str) -> Any:
    if name in CUDA_PLACES and torch.version.cuda is None:
        return None
    place = PLACES.get(name) or CUDA_PLACES.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, path = place.partition(":")
    try:
        found = attrgetter(path)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        package = importlib.import_module(module.partition(".")[0])
        version = getattr(package, "__version__", "of this Python")
        raise ImportError(
            f"{package.__name__} {version} has no {module}.{path}, which tnp calls {name}: install "
            "a version that tnp is tested with, or mend tnp/dispatch/private.py"
        ) from error
    globals()[name] = found
    return found


def in_forward_mode() -> bool:
    """Returns whether a level of dual numbers is open."""
    return forward_ad._current_level >= 0


def has_hooks(module: torch.nn.Module) -> bool:
    """Returns whether a hook would see a call of the module, or the module was compiled."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
        or module._backward_pre_hooks or module._compiled_call_impl
    )  # fmt: skip


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Returns `function.apply` without its part for `torch.func`, whose calls do not come here."""
    return super(torch.autograd.Function, function).apply


def constant_in_graphs(function: Function) -> Function:
    """Decorates a function that torch.compile runs while it traces. The result is a constant.

    torch.compiler.assume_constant_result does this too, but it imports Dynamo, which would slow
    down `import tnp`.
    """
    function._dynamo_marked_constant = True
    return function


def keep_buffers() -> None:
    """Lets a compiled backward pass run several times after one forward pass, in this process."""
    from torch._functorch import config

    config.donated_buffer = False


def allow_graphs(n: int) -> None:
    """Lets torch.compile make at least `n` graphs of one function, in this process."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, n)


def shorten_inductor_messages() -> None:
    """Makes Inductor's messages name operators without their arguments, as torch 2.13 does itself.

    For a log line Inductor formats the arguments of each new custom operator, nested as deeply as
    the graph, even if nothing is logged. With torch 2.11 that takes most of the time to compile a
    model of 12 blocks.
    """
    if torch.__version__ < "2.13":
        # slow to import, and needed only by torch.compile
        from torch._inductor.exc import OperatorIssue

        OperatorIssue.operator_str = staticmethod(_operator_name)


def _operator_name(target: object, args: object, kwargs: object) -> str:
    return f"  target: {target}"


def launcher_in_c(launch: Callable[..., None]) -> Callable[..., None]:
    """Returns Triton's launcher from inside the wrapper that makes tensor maps."""
    return launch.__closure__[launch.__code__.co_freevars.index("launcher")].cell_contents


def tensor_map_encoder() -> Callable[..., Any]:
    """Returns the driver's function that makes a tensor map."""
    import triton

    utils = triton.runtime.driver.active.utils
    return getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor


def prepare_interpreter_once() -> None:
    """Makes Triton's interpreter prepare once in this process, so that gates take less time.

    The interpreter patches its language at every launch and every call of a helper. Here it does so
    once for each module of kernels. It also stops making a table of NumPy's dtypes at every cast,
    and checking for integer overflow, whose result nobody reads.
    """
    from triton.runtime import interpreter

    patch_language, patched = interpreter._patch_lang, set()
    dtype_of = interpreter._get_np_dtype
    dtype_of_number = cache(dtype_of)

    def patch_once(function: Callable) -> SimpleNamespace:
        if function.__module__ not in patched:
            patch_language(function)
            patched.add(function.__module__)
        return SimpleNamespace(restore=lambda: None)

    # the type of a block's elements; a pointer has no hash
    def dtype_of_element(type_: Any) -> Any:
        element = type_.scalar
        return (dtype_of if element.is_ptr() else dtype_of_number)(element)

    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = dtype_of_element
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


@contextmanager
def interpreter_at_rest() -> Iterator[None]:
    """Lets Triton's interpreter skip the bodies of kernels. Host code still runs."""
    from triton.runtime.interpreter import GridExecutor

    interpret = GridExecutor.__call__
    GridExecutor.__call__ = lambda executor, *arguments, **options: None
    try:
        yield
    finally:
        GridExecutor.__call__ = interpret
