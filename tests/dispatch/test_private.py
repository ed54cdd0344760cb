"""Tests that every private interface of another package is there, and means what we think."""

import os

import pytest
import torch
import triton
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tnp.dispatch import private
from tnp.ops.swiglu import swiglu


@pytest.mark.parametrize("name", [*private.PLACES, *private.CUDA_PLACES])
def test_it_is_there(name):
    found = getattr(private, name)
    assert found is not None or (name in private.CUDA_PLACES and torch.version.cuda is None)


def test_a_name_that_is_gone_is_one_sentence(monkeypatch):
    monkeypatch.setitem(private.PLACES, "gone", "torch._C:_no_such_name")
    with pytest.raises(ImportError) as raised:
        from tnp.dispatch.private import gone  # noqa: F401
    assert str(raised.value) == (
        f"torch {torch.__version__} has no torch._C._no_such_name, which tnp calls gone: install a "
        "version that tnp is tested with, or mend tnp/dispatch/private.py"
    )


def test_the_environment_is_read_as_it_stands(monkeypatch):
    name = os.environ.encodekey("TNP_AUTO")
    for value in ("torch", "", "other"):
        monkeypatch.setenv("TNP_AUTO", value)
        assert private.environment(name) == os.environ.encodevalue(value)
    monkeypatch.delenv("TNP_AUTO")
    assert private.environment(name) is None


def test_who_watches_calls_is_seen():
    assert not private.n_dispatch_modes() and not private.dispatch_modes()
    with TorchDispatchMode() as mode:
        assert private.n_dispatch_modes() == 1 and private.dispatch_modes() == [mode]
    assert not private.in_function_mode()
    with torch.device("meta"):
        assert private.in_function_mode()
    with FlopCounterMode(display=False):  # where `tnp.dispatch.custom_op` adds our formulas
        assert any(hasattr(one.counter, "flop_registry") for one in private.dispatch_modes())


def test_hooks_are_seen():
    layer = torch.nn.Linear(2, 2)
    assert not private.has_hooks(layer) and not private.has_global_hooks()
    handles = (
        layer.register_forward_hook, layer.register_forward_pre_hook,
        layer.register_full_backward_hook, layer.register_full_backward_pre_hook,
    )  # fmt: skip
    for register in handles:
        handle = register(lambda *_: None)
        assert private.has_hooks(layer)
        handle.remove()
    assert not private.has_hooks(layer)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert private.has_global_hooks()
    handle.remove()
    assert private.saved_tensors_hooks(False) is None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert private.saved_tensors_hooks(False) is not None


def test_transforms_are_seen():
    found = []

    def look(x):
        (level,) = private.functorch_levels()
        found.append((private.functorch_level() is not None, level.key() == private.FUNCTIONALIZE))
        found.append((private.is_batched_tensor(x), private.is_wrapped_tensor(x)))
        return x

    x = torch.ones(2)
    torch.func.vmap(look)(x), torch.func.functionalize(look)(x)
    assert found == [(True, False), (True, True), (True, True), (False, True)]
    assert private.functorch_level() is None and not private.functorch_levels()


def test_modes_of_autograd_are_seen_and_settings_of_the_compiler_are_set():
    from torch._dynamo import config
    from torch._functorch import config as functorch_config

    assert not private.in_forward_mode() and not private.in_autocast()
    with forward_ad.dual_level():
        assert private.in_forward_mode()
    with torch.autocast("cpu"):
        assert private.in_autocast()
        with private.DisableAutocast():
            assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.float32
    previous = torch.are_deterministic_algorithms_enabled()
    for asked in (True, False):
        torch.use_deterministic_algorithms(asked)
        assert private.is_deterministic() == asked
    torch.use_deterministic_algorithms(previous)
    with config.patch(recompile_limit=8), functorch_config.patch(donated_buffer=True):
        private.allow_graphs(32)
        private.allow_graphs(4)
        assert config.recompile_limit == 32
        private.keep_buffers()
        assert functorch_config.donated_buffer is False


def test_tritons_launchers_are_known():
    from triton.backends.nvidia.driver import wrap_handle_tensordesc

    version = tuple(map(int, triton.__version__.split(".")[:2]))
    assert version in private.KNOWN_LAUNCHERS, (
        f"tnp.dispatch.launcher has not seen Triton {version}"
    )
    meta = {"swizzle": 0, "elem_size": 2, "elem_type": 0, "block_size": [1], "fp4_padded": False}
    signature = {"x": "tensordesc<fp16[1]>"}
    wrapped = wrap_handle_tensordesc(print, signature, [meta])
    assert wrapped is not print and private.launcher_in_c(wrapped) is print


def test_the_interpreter_prepares_once():
    """The session has called `prepare_interpreter_once`, so kernels here run with what it sets."""
    from triton.runtime import interpreter

    assert interpreter._patch_lang.__module__ == private.__name__
    assert interpreter._get_np_dtype.__module__ == private.__name__
    assert interpreter.interpreter_builder.options.sanitize_overflow is False
    assert interpreter._get_np_dtype(triton.language.bfloat16).itemsize == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_the_interpreter_at_rest_leaves_results_alone():
    x = torch.ones(2, 8)
    expected = swiglu(x, x, implementation="triton")
    with private.interpreter_at_rest():
        assert not torch.equal(swiglu(x, x + 1, implementation="triton"), 2 * expected)
    assert torch.equal(swiglu(x, x + 1, implementation="triton"), 2 * expected)
