"""Tests CUDA C++ without a GPU: refusals, launches, and sources that run on this CPU."""

from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points

import pytest
import torch

from tests.lab import emulation
from tests.lab.judging import H200, assert_within_budget, bound, emulates, judged, refused
from tnp.dispatch import devices, plans, selection
from tnp.dispatch.registry import catalog
from tnp.dispatch.spec import Call
from tnp.experiment import code_hash, kernel_code
from tnp.ops import attention, softmax
from tnp_lab import launch, nvrtc
from tnp_lab.cuda_rows import vector
from tnp_lab.softmax import ONE_PASS_WIDTH
from tnp_lab.softmax.cuda_softmax import MOST_THREADS, ONE_PASS, shape

IN_CUDA = [("softmax", "three_passes"), ("softmax", "one_pass"), ("attention", "wmma")]
STEPS = ("wmma_step_1", "wmma_step_2", "wmma_step_3")  # of `wmma_steps.cu`
INF = float("inf")

compiles = pytest.mark.skipif(
    nvrtc.missing() is not None, reason=f"CUDA C++ does not compile here: {nvrtc.missing()}"
)
emulates_cute = pytest.mark.skipif(
    not (nvrtc.cutlass() and nvrtc.shutil.which("nvcc")), reason="CUTLASS or nvcc is not here"
)


@pytest.mark.parametrize("entry", sorted(
    entry.name for entry in entry_points(group="tnp.implementations") if "tnp_lab" in entry.value
))  # fmt: skip
def test_auto_never_chooses_cuda(entry):
    """A table that names an implementation of another package is followed if it is selectable."""
    assert not catalog().load(*entry.split(".")).selectable


ROWS = partial(refused, "softmax", rows=9)
HEADS = partial(refused, "attention", "wmma", batch=1, n_heads=4, n_q=9, n_k=9)


def test_cuda_refuses_in_a_sentence(here):
    assert ROWS("three_passes", "float32", width=200_000) is None
    assert ROWS("one_pass", "float32", width=32_768) is None
    assert "32768 at most, not 32769" in ROWS("one_pass", "float32", width=32_769)
    assert ROWS("one_pass", "float32", ("x",), width=8) == "it is forward only"
    assert HEADS("float16", head_dim=64, causal=True, n_kv_heads=2) is None
    assert HEADS("bfloat16", ("q",), head_dim=128) is None
    for step in STEPS:
        sizes = {"batch": 1, "n_heads": 4, "n_q": 9, "n_k": 9, "head_dim": 64}
        assert refused("attention", step, "float16", **sizes, n_kv_heads=2, causal=True) is None
        assert refused("attention", step, "float16", ("q",), **sizes) == "it is forward only"
    assert "64, 128, not 96" in HEADS("float16", head_dim=96)
    assert "not float32" in HEADS("float32", head_dim=64)
    assert "window=3" in HEADS("float16", head_dim=64, window=3)
    old = partial(HEADS, target=devices.of_capability(75), head_dim=64)
    assert old("float16") is None
    assert "8.0" in old("bfloat16") and old("float16", ("q",)) is None
    assert "7.5 or newer" in HEADS("float16", target=devices.of_capability(70), head_dim=64)
    assert "not cpu" in HEADS("float16", target=devices.CPU, head_dim=64)


def test_cute_needs_cutlass_and_nvcc(here, monkeypatch):
    sizes = {"batch": 1, "n_heads": 4, "n_q": 9, "n_k": 9, "head_dim": 64}

    def cute(dtype, **changed):
        return refused("attention", "cute", dtype, **sizes | changed)

    monkeypatch.setattr(nvrtc, "cutlass", lambda: None)
    assert "pip install './lab[cute]'" in cute("float16")
    monkeypatch.setattr(nvrtc, "cutlass", lambda: "/somewhere")
    monkeypatch.setattr(nvrtc.shutil, "which", lambda name: None)
    assert cute("float16").startswith("nvcc, which compiles sources with CUTLASS, is not here")
    monkeypatch.setattr(nvrtc.shutil, "which", lambda name: name)
    assert cute("float16") is None and cute("bfloat16", head_dim=32) is None
    assert "32, 64, 128, not 96" in cute("float16", head_dim=96)
    assert "8.0 or newer" in cute("float16", target=devices.of_capability(75))


def test_the_headers_of_cutlass_are_found_where_a_wheel_puts_them(monkeypatch, tmp_path):
    nvrtc.cutlass.cache_clear()
    monkeypatch.setattr(nvrtc, "CUTLASS", (("no_such_package",), ("carrier_of_headers", "include")))
    monkeypatch.syspath_prepend(tmp_path)
    assert nvrtc.cutlass() is None
    nvrtc.cutlass.cache_clear()
    folder = tmp_path / "carrier_of_headers" / "include"
    (folder / "cute").mkdir(parents=True)
    (folder / "cute" / "tensor.hpp").touch()
    (folder.parent / "__init__.py").touch()
    assert nvrtc.cutlass() == str(folder)
    nvrtc.cutlass.cache_clear()


def test_a_missing_package_is_named(monkeypatch):
    nvrtc.missing.cache_clear()
    monkeypatch.setattr(nvrtc, "_is_installed", lambda module: False)
    assert "pip install './lab[cuda]'" in HEADS("float16", head_dim=64)
    nvrtc.missing.cache_clear()
    monkeypatch.setattr(nvrtc, "_is_installed", lambda module: True)
    monkeypatch.setattr(nvrtc, "_nvrtc_is_here", lambda: False)
    monkeypatch.setattr(nvrtc.shutil, "which", lambda name: None)
    assert "neither NVRTC" in HEADS("float16", head_dim=64)
    nvrtc.missing.cache_clear()


@pytest.mark.parametrize("op, name", IN_CUDA)
def test_it_is_never_chosen_but_by_its_name(op, name, here):
    operator = catalog().operator(op)
    assert not catalog().load(op, name).chosen_from
    for case in operator.cases(H200):
        chosen, _ = selection.choose_implementation(operator, "auto", Call(case.problem, H200))
        assert chosen.name not in {name for _, name in IN_CUDA}


# ------------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("at_once", [1, 4, 8])
def test_the_threads_of_a_row_hold_it_whole(at_once):
    for width in (1, 31, 32, 33, 100, 511, 1025, 8192, 16_385, ONE_PASS_WIDTH):
        if width % at_once:
            continue
        sizes = shape(width, at_once)
        threads, unroll = sizes["THREADS"], sizes["UNROLL"]
        assert width <= threads * unroll * at_once and unroll * at_once <= 32
        assert threads % nvrtc.WARP == 0 and threads <= MOST_THREADS
        assert sizes["ROWS"] == (4 if threads == nvrtc.WARP else 1)
        assert unroll == 1 or width > threads * (unroll // 2) * at_once  # no more than needed
    with pytest.raises(ValueError, match="32769"):
        shape(ONE_PASS_WIDTH + 1, 1)


def test_16_bytes_are_read_at_once_where_every_row_begins_at_them():
    assert vector("float16", 64, True) == vector("bfloat16", 8, True) == 8
    assert vector("float32", 1000, True) == 4
    assert vector("float16", 64, False) == vector("float16", 100, True) == 1
    assert vector("float32", 1001, True) == 1


@pytest.mark.parametrize("rows, width, name, blocks, threads", [
    (7, 100, "three_passes", 7, 256),
    (7, 8192, "one_pass", 7, 512),
    (7, 128, "one_pass", 2, 128),  # a row is a warp's, four of them a block's
    (8, 512, "one_pass", 2, 128),
    (9, 513, "one_pass", 9, 64),
])  # fmt: skip
def test_blocks_of_softmax(rows, width, name, blocks, threads, here):
    found = bound("softmax", name, softmax.OPERATOR.case("float16", rows, width))
    assert (found.grid, found.threads) == ((blocks,), threads)
    assert found.architecture == "sm_90a"


@pytest.mark.parametrize("name", ["wmma", *STEPS])
@pytest.mark.parametrize("n_q, blocks", [(1, 6), (64, 6), (65, 12), (777, 78)])
def test_blocks_of_attention(n_q, blocks, name, here):
    case = attention.OPERATOR.case("float16", 2, 3, n_q, 100, 64)
    found = bound("attention", name, case)
    assert (found.grid, found.threads) == ((blocks,), 128)


@pytest.mark.parametrize("name, blocks, threads", [
    ("wmma_step_1", 18, 64),  # 32 queries: q and o of more do not fit in shared memory
    ("wmma_step_2", 12, 128),
    ("wmma_step_3", 12, 128),
])  # fmt: skip
def test_blocks_of_the_steps_at_the_longest_rows(name, blocks, threads, here):
    found = bound("attention", name, attention.OPERATOR.case("float16", 2, 3, 65, 100, 128))
    assert (found.grid, found.threads) == ((blocks,), threads)


def test_a_launch_is_noted_with_the_hash_of_its_source(here):
    with kernel_code.launches() as noted:
        bound("softmax", "one_pass", softmax.OPERATOR.case("float16", 7, 100))
    name = ONE_PASS.replace(":", ".")
    assert noted == {name: code_hash.fingerprint([ONE_PASS])}


# --------------------------------------------------------------------------------------- numerics


STRIDED = ("bfloat16", 9, 100, {"batch": 3, "start": 1})  # and not at multiples of 16 bytes
SOFTMAX = [
    ("one_pass", "float16", 9, 64, {}),  # rows that share blocks, the last of which is not full
    ("one_pass", *STRIDED),
    ("one_pass", "bfloat16", 2, 32_768, {}),
    ("three_passes", *STRIDED),
    ("three_passes", "float32", 5, 1000, {"masked": 3, "magnitude": 1e3}),
    ("three_passes", "float32", 3, 1, {}),
]
ATTENTION = [  # two heads share keys
    ("bfloat16", 33, 70, 64, {"n_kv_heads": 2}),
    ("float16", 65, 65, 64, {"causal": True}),
    ("float16", 80, 20, 128, {"causal": True}),  # the first 60 queries see no key
    ("float16", 40, 133, 64, {"base2": True, "magnitude": 8.0}),
]


@emulates
@pytest.mark.parametrize("name, dtype, rows, width, drawn", SOFTMAX)
def test_softmax_is_within_its_budget(name, dtype, rows, width, drawn, here):
    assert_within_budget("softmax", name, softmax.OPERATOR.case(dtype, rows, width, **drawn))


@emulates
@pytest.mark.parametrize("name", ["three_passes", "one_pass"])
def test_softmax_of_infinities_and_nan_equals_pytorchs(name, here):
    x = torch.randn(6, 130, generator=torch.Generator().manual_seed(0))
    x[0, :70] = x[1, 60:] = x[2] = -INF
    x[3, 77], x[4, 66], x[5] = INF, float("nan"), -3e38
    plan = plans.build(softmax.OPERATOR, name, (x,), (), (), H200)
    torch.testing.assert_close(plan.run((x,), ()), torch.softmax(x, -1), equal_nan=True)


@emulates
@pytest.mark.parametrize("name", ["wmma", *STEPS])
@pytest.mark.parametrize("dtype, n_q, n_k, head_dim, kind", ATTENTION)
def test_attention_is_within_its_budget(name, dtype, n_q, n_k, head_dim, kind, here):
    kind = {"n_kv_heads": 1} | kind
    case = attention.OPERATOR.case(dtype, 1, 2 * kind["n_kv_heads"], n_q, n_k, head_dim, **kind)
    assert_within_budget("attention", name, case)


@pytest.mark.parametrize("n_heads, queries_a_warp", [(132, 16), (133, 32)])
def test_blocks_of_cute_are_halved_where_they_are_few(n_heads, queries_a_warp, here, monkeypatch):
    monkeypatch.setattr(nvrtc, "cutlass", lambda: "/somewhere")
    monkeypatch.setattr(nvrtc.shutil, "which", lambda name: name)
    launched = bound(
        "attention", "cute", attention.OPERATOR.case("float16", 1, n_heads, 128, 9, 64)
    )
    assert dict(launched.source.constants)["QUERIES_A_WARP"] == queries_a_warp
    assert launched.grid == (n_heads * 32 // queries_a_warp,)


@emulates_cute
@pytest.mark.parametrize("multiprocessors", [1, 132])  # blocks of 128 queries, and of 64
@pytest.mark.parametrize("dtype, n_q, n_k, head_dim, kind", [
    ("bfloat16", 133, 197, 32, {"n_kv_heads": 2}),
    ("float16", 130, 130, 32, {"causal": True, "lse": True}),
    ("float16", 33, 200, 64, {"causal": True}),  # the first tiles need no mask
    ("float16", 200, 70, 64, {"causal": True}),  # the first 130 queries see no key
    ("bfloat16", 129, 65, 128, {"base2": True, "magnitude": 8.0}),
])  # fmt: skip
def test_cute_is_within_its_budget(dtype, n_q, n_k, head_dim, kind, multiprocessors, here):
    kind = {"n_kv_heads": 1} | kind
    case = attention.OPERATOR.case(dtype, 1, 2 * kind["n_kv_heads"], n_q, n_k, head_dim, **kind)
    target = replace(H200, multiprocessors=multiprocessors)
    assert_within_budget("attention", "cute", case, target=target)


@emulates_cute
def test_gradients_of_cute(here):
    case = attention.OPERATOR.case("float16", 1, 2, 70, 90, 32, causal=True, n_kv_heads=1)
    assert_within_budget("attention", "cute", case, wanted=("q", "k", "v"))


@emulates
@pytest.mark.parametrize("dtype, n_q, n_k, head_dim, kind", [
    ("float16", 40, 83, 64, {}),
    ("bfloat16", 33, 40, 64, {"causal": True, "lse": True}),
    ("float16", 80, 20, 64, {"causal": True, "n_kv_heads": 1}),  # 60 queries see no key
    ("bfloat16", 35, 70, 128, {"causal": True, "n_kv_heads": 1}),
    ("float16", 20, 33, 128, {"base2": True}),
])  # fmt: skip
def test_gradients_of_cuda(dtype, n_q, n_k, head_dim, kind, here):
    """Two heads share keys where `n_kv_heads` is 1."""
    heads = 1 + ("n_kv_heads" in kind)
    case = attention.OPERATOR.case(dtype, 2, heads, n_q, n_k, head_dim, **kind)
    assert_within_budget("attention", "wmma", case, wanted=("q", "k", "v"))


@emulates
@pytest.mark.parametrize("name", ["wmma", *STEPS])
@pytest.mark.parametrize("aligned", [True, False])
def test_attention_of_other_strides(aligned, name, here):
    """Rows that are not aligned are copied: a load of 16 bytes would read another address."""
    start = 0 if aligned else 1
    q, k = torch.randn(2, 1, 2, 40, 64 + start).half()[..., start:].unbind()
    v = torch.randn(1, 40, 2, 64 + start).half()[..., start:].transpose(1, 2)
    inputs = (q, k, v, None, None, None)
    plan = plans.build(attention.OPERATOR, name, inputs, (), (), H200)
    assert plan.what.aligned == aligned
    expected = attention.OPERATOR.reference(*(x.double() for x in inputs[:3]), *inputs[3:], 0.125)
    torch.testing.assert_close(plan.run(inputs, (0.125,)).double(), expected, atol=2e-3, rtol=0)


@emulates
@pytest.mark.parametrize("start", [0, 1])
def test_gradients_of_a_strided_do(start, here):
    """A do whose rows are not aligned is copied, too."""
    q, k, v = torch.randn(3, 1, 1, 40, 64).half().unbind()
    do = torch.randn(1, 40, 1, 64 + start).half()[..., start:].transpose(1, 2)
    inputs, wanted = (q, k, v, None, None, None), ("q", "k", "v")
    plan = plans.build(attention.OPERATOR, "wmma", inputs, (), wanted, H200)
    (o,), saved = plan.forward(inputs, (0.125,))
    found = plan.backward((do,), tuple(plan.kept(inputs, (o,))), saved, (0.125,))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    attention.OPERATOR.reference(*wide, *inputs[3:], 0.125).backward(do.double())
    for x, gradient in zip(wide, found, strict=True):
        torch.testing.assert_close(gradient.double(), x.grad, atol=4e-3, rtol=0)


# Controls: a fault in a source, which a case must find.
SLIPS = [
    ("three_passes", "sum += expf", "sum = expf"),
    ("wmma", "__pipeline_wait_prior(1)", "__pipeline_wait_prior(2)"),
    ("wmma_step_1", "stored[i] *= factors[i / HEAD_DIM]", "stored[i] *= factors[0]"),
    ("wmma_step_2", "factors[row_of[i]]", "factors[0]"),
    ("wmma_step_3", "to + row * ROW", "to + row * HEAD_DIM"),
    ("backward", "__pipeline_wait_prior(1)", "__pipeline_wait_prior(2)"),
    ("backward", "dp[place] - delta[of_head + query]", "dp[place]"),
    ("backward", "key <= query", "key < query"),
    pytest.param("cute", "start + Keys > seen_by_all", "start > seen_by_all", marks=emulates_cute),
    pytest.param("cute", "l[i] *= factors[i]", "l[i] *= 1.0f", marks=emulates_cute),
]


@emulates
@pytest.mark.parametrize("name, right, wrong", SLIPS)
def test_a_slip_is_found_out(name, right, wrong, here, monkeypatch):
    def slipped(source, architecture):
        text = source.path.read_text()
        if source.path.stem == ("wmma_steps" if name in STEPS else name):
            assert right in text
            text = text.replace(right, wrong, 1)
        return emulation.compiled(source, text)

    monkeypatch.setattr(launch, "loaded", slipped)
    if name == "three_passes":
        found = judged("softmax", name, softmax.OPERATOR.case("float32", 3, 1000))
    else:
        kind = {"n_kv_heads": 2, "causal": True}
        case = attention.OPERATOR.case("float16", 1, 4, 17, 130, 64, **kind)
        backward = name == "backward"
        wanted = ("q", "k", "v") if backward else ()
        target = replace(H200, multiprocessors=1)  # cute loads 64 keys at once then, not 128
        found = judged("attention", "wmma" if backward else name, case, wanted, target)
    assert any(not ratio <= allowed for _, ratio, allowed in found)


# ------------------------------------------------------------------------------------ compilation

SIZES = {"VECTOR": 4, **shape(1000, 4)}


def source(**named) -> nvrtc.Source:
    return nvrtc.Source(ONE_PASS, nvrtc.constants(**{"TYPE": "float", **SIZES, **named}))


def compilers() -> list:
    found = [("nvrtc", nvrtc._by_nvrtc)] if not nvrtc.missing() and nvrtc._nvrtc_is_here() else []
    return found + ([("nvcc", nvrtc._by_nvcc)] if nvrtc.shutil.which("nvcc") else [])


@compiles
def test_every_compiler_that_is_here_builds_for_a_gpu_that_is_not():
    for name, by in compilers():
        cubin, log = by(source(), "sm_86")
        assert cubin.startswith(b"\x7fELF"), name
        said = nvrtc.resources(log, source().name)
        assert said["registers"] > 0 and said["spill_bytes"] == 0, name


@compiles
def test_a_fault_in_a_source_ends_in_the_compilers_message(monkeypatch):
    for name, by in compilers():
        monkeypatch.setattr(nvrtc, "_nvrtc_is_here", lambda name=name: name == "nvrtc")
        with pytest.raises(nvrtc.CompilationError) as raised:
            nvrtc.build(source(TYPE="nothing"), "sm_80")
        message = str(raised.value)
        assert message.startswith("one_pass.cu does not compile for sm_80 with {")
        assert '"nothing" is undefined' in message, (name, by)


def test_compiled_code_is_kept_until_what_it_is_made_of_changes(monkeypatch, tmp_path):
    built = []

    def build(source, architecture):
        built.append(architecture)
        return nvrtc.Compiled(b"code", "", 0.0)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(nvrtc, "build", build)
    monkeypatch.setattr(nvrtc, "_compiler", lambda of_cutlass: "one")
    for _ in range(2):
        assert nvrtc.cached(source(), "sm_80") == b"code"
    assert built == ["sm_80"]
    nvrtc.cached(source(), "sm_86")
    nvrtc.cached(source(ROWS=2), "sm_86")
    monkeypatch.setattr(nvrtc, "_compiler", lambda of_cutlass: "another")
    nvrtc.cached(source(), "sm_80")
    monkeypatch.setattr(nvrtc.Source, "texts", lambda self: iter(["other text"]))
    nvrtc.cached(source(), "sm_80")
    assert built == ["sm_80", "sm_86", "sm_86", "sm_80", "sm_80"]


def test_the_architecture_can_be_said():
    assert launch.Bound(source(), 90, (1,), 32).architecture == "sm_90a"
    assert launch.Bound(source(), 120, (1,), 32).architecture == "sm_120"
    assert launch.Bound(source(), 90, (1,), 32, architecture="sm_86").architecture == "sm_86"


def test_the_compiler_of_silence_is_named():
    with pytest.raises(nvrtc.CompilationError, match="ptxas said nothing"):
        nvrtc.resources("", "attention_wmma")
