"""Tests rows of language models, and that all forms write the same text. No test asserts a time."""

import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import pyarrow as pa
import pytest
import torch

from tests.bench.configurations import TIMING
from tnp.bench import compiled_decoder, language, language_hf
from tnp.bench.language import Asked, measure_language, step_bytes
from tnp.bench.language_forms import FORMS, INT8, WEIGHTS
from tnp.bench.outcome import failure_rows
from tnp.bench.policy import Policy
from tnp.experiment.failures import Unsupported
from tnp.llm.sizes import MODELS
from tnp.ops.quantized_linear.quantizer import quantize_weight
from tnp.store.schemas import PROVENANCE, RUN, TABLES

N_NEW = 5
NAMES = ("hf", "compiled_decoder", "ours", "vllm")


def parameters(**changes) -> dict:
    return {
        "config_id": "language_models--small--b2_p7_bf16",
        "study": "language_models",
        "shape": "small",
        "model": "small_llama",
        "weights": "bf16",
        "batch": 2,
        "n_prompt": 7,
        "n_new": N_NEW,
        "dtype": "float32",
        "forms": list(NAMES),
        "replicate": 1,
        "timing": TIMING,
        "device": "cpu",
        "device_slug": "cpu",
    } | changes


def asked(model: str = "small_llama", weights: str = "bf16", dtype: str = "float32") -> Asked:
    return Asked(model, weights, 2, 7, N_NEW, dtype, torch.device("cpu"))


@pytest.fixture(scope="module", autouse=True)
def plain():
    """Runs without `torch.compile`, which takes a minute, and ours by PyTorch's operators."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **how: function)
        patch.setitem(FORMS, "ours", replace(FORMS["ours"], implementation="torch"))
        yield


@pytest.fixture(scope="module")
def tables(plain):
    return measure_language(parameters(), time.perf_counter())


def test_every_form_has_a_row_that_fits_its_table(tables):
    rows = tables["generations"]
    assert tuple(row["form"] for row in rows) == NAMES
    assert [row["status"] for row in rows] == ["ok", "ok", "ok", "unsupported"], rows
    assert rows[-1]["reason"].startswith("vLLM must run in a process of its own")
    assert [row["gates"] for row in rows] == ["", "", "decoder--llama|decode--llama", ""]
    assert rows[2]["operators"] == '{"decoder": "torch"}' and rows[0]["operators"] == "{}"
    added = {name for name, _ in PROVENANCE + RUN}
    for row in rows[:-1]:
        assert set(row) | added | {"peak_memory_bytes"} == set(TABLES["generations"].names)
        assert row["config_id"] == f"language_models--small--b2_p7_bf16--{row['form']}"
        assert row["tokens_per_s"] == 2e3 / row["token_ms_p50"]
    assert rows[0]["bare_ms"] is None and rows[1]["bare_ms"] > 0 and rows[2]["bare_ms"] > 0
    assert "transformers" in rows[0]["packages"] and "transformers" not in rows[1]["packages"]
    pa.Table.from_pylist(rows, schema=TABLES["generations"])
    assert {row["implementation"] for row in tables["code"]} == set(NAMES)


def test_a_tokens_time_is_the_difference_of_two_calls(tables):
    for row in tables["generations"][:-1]:
        of_form = [one for one in tables["samples"] if one["config_id"] == row["config_id"]]
        whole, prompt = (
            [one["time_ms"] for one in of_form if one["pass"] == name]
            for name in (f"generation {row['form']}", f"prompt {row['form']}")
        )
        assert len(whole) == len(prompt) == row["n_samples"] >= 2
        token = [(a - b) / (N_NEW - 1) for a, b in zip(whole, prompt, strict=True)]
        assert row["token_ms_max"] == pytest.approx(max(token))
        assert row["prompt_ms_max"] == max(prompt)


def test_a_fast_form_is_called_more_often_in_the_same_time(monkeypatch):
    """A form whose turn takes a ninth of another's has three turns a round."""
    monkeypatch.setattr(language, "call_ms", lambda call, device: {"slow": 27, "fast": 3}[call()])
    order: list = []

    def calls(form: str) -> list:
        return [[lambda n=n: order.append((form, n)) or form] for n in (5, 1)]

    policy = Policy.from_parameters(TIMING | {"long_step_s": 0.0, "max_sampling_s": 5.0})
    forms = [calls("slow"), calls("fast")]
    (slow, _), (fast, prompt) = language._measured(forms, torch.device("cpu"), policy)
    rounds = policy.min_samples
    assert len(slow.samples_ms) == rounds and slow.n_warmup == 1
    assert len(fast.samples_ms) == len(prompt.samples_ms) == 3 * rounds and fast.n_warmup == 3
    assert fast.ended_s == sorted(fast.ended_s)
    for turn in range(1 + rounds):  # behind the calls whose times decide
        of_round = order[4 + 8 * turn :][:8]
        assert [of_round.count((form, 5)) for form in ("slow", "fast")] == [1, 3]
        assert [of_round.count((form, 1)) for form in ("slow", "fast")] == [1, 3]


@pytest.mark.parametrize("model", ["small_gpt2", "small_llama", "small_qwen3"])
def test_forms_write_the_same_text(model):
    """In float64 no two logits are so near that the largest is another."""
    of_model = asked(model, dtype="float64")
    prompts = of_model.prompts(1)
    builds = (
        language_hf.dynamic, language_hf.static, language_hf.batched, compiled_decoder.compiled,
        language.ours,
    )  # fmt: skip
    with ExitStack() as ends:
        writers = [build(of_model) for build in builds]
        for writer in writers:
            ends.callback(writer.close)
        hf, *others = (writer.write(prompts, N_NEW) for writer in writers)
    assert hf.shape == (2, N_NEW) and len(hf.unique()) > 2
    for other in others:
        torch.testing.assert_close(other, hf)


def test_continuous_batching_says_what_failed_and_ends_whatever_happens(monkeypatch):
    of_model, before = asked(), threading.active_count()
    writer = language_hf.batched(of_model)
    with pytest.raises(RuntimeError, match="^continuous batching failed: index out of range"):
        writer.write(torch.full((2, 7), of_model.sizes.vocab), N_NEW)
    writer.close()

    def fails(*arguments):
        assert threading.active_count() == before + 1
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(language, "_timed", fails)
        measure_language(parameters(forms=["hf_batched"]), time.perf_counter())
    assert threading.active_count() == before

    monkeypatch.setattr(language_hf, "MOST_MASKED", 23)  # two sequences have 2 · (7 + 5) tokens
    with pytest.raises(Unsupported, match="they have 24 tokens, and the form takes at most 23$"):
        language_hf.batched(of_model)


@pytest.mark.parametrize("model", ["small_gpt2", "small_llama"])
def test_a_compiled_product_of_eight_bits_has_a_scale_for_each_row(model):
    """The product is rounded, rounded with its scale, and rounded with its bias: 2⁻⁸ each."""
    of_model = asked(model, INT8, "bfloat16")
    linear = of_model.decoder.layers[0].up
    product, x = compiled_decoder.Product(linear, 8), torch.randn(2, 3, 256, dtype=torch.bfloat16)
    codes = quantize_weight(linear.weight, 8, None)
    assert product.weight.dtype == torch.int8 and product.scales.shape == linear.shape[:1]
    bias = 0 if linear.bias is None else linear.bias.double()

    def within(scales: torch.Tensor) -> bool:
        exact = x.double() @ (codes.weight.double() * scales.double()).mT
        error = product(x).double() - exact - bias
        return bool((error.abs() <= 3 * 2**-8 * (exact.abs() + abs(bias))).all())

    assert within(codes.scales) and not within(codes.scales.roll(1, 0))
    wanted = x.double() @ linear.weight.double().mT + bias
    assert (product(x).double() - wanted).norm() < 0.02 * wanted.norm()
    assert compiled_decoder.compiled(of_model).write(of_model.prompts(1), 2).shape == (2, 2)


def test_a_form_that_fails_says_why_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr(language_hf, "build", lambda model, decoder: 1 / 0)
    asked_for = parameters(forms=["hf", "compiled_decoder"])
    rows = measure_language(asked_for, time.perf_counter())["generations"]
    assert [row["status"] for row in rows] == ["error", "ok"]
    assert "ZeroDivisionError" in rows[0]["reason"]


def test_a_form_that_returns_too_few_tokens_is_refused(monkeypatch):
    short = language.Writer(lambda ids, n_new: ids, 0)
    monkeypatch.setattr(compiled_decoder, "compiled", lambda asked: short)
    asked_for = parameters(forms=["compiled_decoder"])
    (row,) = measure_language(asked_for, time.perf_counter())["generations"]
    assert row["status"] == "error" and "they must be [2, 5]" in row["reason"]


def test_a_process_that_measures_nothing_has_a_row_for_each_form():
    rows = failure_rows("generation", parameters(), "timeout", "no progress")["generations"]
    assert [(row["form"], row["status"]) for row in rows] == [
        (form, "timeout") for form in parameters()["forms"]
    ]
    pa.Table.from_pylist(rows, schema=TABLES["generations"])


def test_counted_bytes_are_those_of_the_published_sizes():
    """Gigabytes of weights, and 32 KiB of cache for each token of Llama 3.2 1B."""
    counted = {
        (name, weights): step_bytes(MODELS[name].sizes, weights, 1, 0) / 1e9
        for name in ("gpt2", "llama3_1b", "qwen3_0_6b", "llama3_8b")
        for weights in WEIGHTS
    }
    assert counted["gpt2", "bf16"] == pytest.approx(0.247, abs=1e-3)
    assert counted["llama3_1b", "bf16"] == pytest.approx(2.47, abs=5e-3)
    assert counted["llama3_1b", "int8"] == pytest.approx(1.26, abs=5e-3)
    assert counted["llama3_1b", "int4"] == pytest.approx(0.77, abs=5e-3)
    assert counted["qwen3_0_6b", "bf16"] == pytest.approx(1.19, abs=5e-3)
    assert counted["llama3_8b", "int8"] == pytest.approx(7.62, abs=1e-2)
    sizes = MODELS["llama3_1b"].sizes
    cached = step_bytes(sizes, "int8", 8, 1000) - step_bytes(sizes, "int8", 8, 0)
    assert cached == 8 * 1000 * 32 * 1024


def test_forms_name_functions_that_exist():
    for form in FORMS.values():
        module, _, name = form.start.partition(":")
        assert callable(getattr(__import__(module, fromlist=[name]), name))
