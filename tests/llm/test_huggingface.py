"""Tests of the readers, and of decoding behind Hugging Face's `generate`.

The models are those of the transformers that is installed: requirements.txt pins it, and `.ci/run`
runs these tests under the newest release too.
"""

import functools
import gc
import logging
import sys
import weakref
from dataclasses import replace
from unittest import mock

import pytest
import torch
import transformers
from torch import nn

from tests.llm.test_decoder import IDS, TINY
from tests.refusals import assert_refused
from tnp.llm import huggingface, models, reference
from tnp.llm.decoder import Decoder
from tnp.llm.huggingface import Unreadable, build, decode, decoder_of, forget, read
from tnp.util.extras import MissingExtra

GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
MASK = {"attention_mask": torch.ones_like(IDS)}
LLAMA = {
    "vocab_size": 50, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 64,
}  # fmt: skip


def model_of(kind: str, dtype: torch.dtype = torch.float32, **sizes):
    model = replace(TINY[kind], sizes=replace(TINY[kind].sizes, **sizes))
    return build(model, models.draw(model, dtype=dtype))


def built(kind: str, **config):
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}Config")(**LLAMA | config)
    return getattr(transformers, f"{kind}ForCausalLM")(made).eval()


def distance(model, longest: int | None = None) -> float:
    """Returns the relative distance of the reference's logits from the model's, in float64."""
    ids = torch.randint(50, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.double()(ids).logits
    found = reference.logits(read(model, longest), ids)
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", TINY)
def test_a_built_model_is_read_again(kind: str, tied: bool):
    model = model_of(kind, tied=tied)
    decoder = Decoder.of(model)
    drawn = replace(TINY[kind], sizes=replace(TINY[kind].sizes, tied=tied))
    expected = models.draw(drawn)
    assert decoder.sizes == expected.sizes and decoder.nbytes == expected.nbytes
    assert (decoder.head.weight is decoder.embedding) == tied
    assert torch.equal(reference.logits(decoder, IDS), reference.logits(expected, IDS))
    assert distance(model) < (1e-12 if kind == "gpt2" else 1e-6)
    assert read(model, 50).sizes.longest == 50


@pytest.mark.parametrize(
    ("kind", "rope"),
    [
        ("Mistral", {}),
        ("Llama", {"rope_type": "linear", "factor": 4.0}),
        ("Llama", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
        ("Qwen3", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                   "high_freq_factor": 4.0, "original_max_position_embeddings": 16}),
    ],
)  # fmt: skip
def test_other_rotations_and_mistral_are_read(kind: str, rope: dict):
    rope = {"rope_type": "default", "rope_theta": 1e4} | rope
    more = {"sliding_window": None} if kind == "Mistral" else {}
    model = built(kind, rope_parameters=rope, **more)
    nn.init.normal_(model.lm_head.weight)
    assert distance(model) < 1e-6
    assert read(model).sizes.kind == ("qwen3" if kind == "Qwen3" else "llama")


def test_what_the_readers_do_not_know_is_refused():
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    mixed, adapted, meta, partial = (built("Llama") for _ in range(4))
    mixed.model.norm.half()
    adapted.model.layers[1].mlp.up_proj = type("Linear", (nn.Linear,), {})(64, 128, bias=False)
    partial.model.rotary_emb.inv_freq = partial.model.rotary_emb.inv_freq[:8]
    gpt2 = {"n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 50, "n_positions": 64}

    def old(**config):
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**gpt2 | config))

    experts = transformers.MixtralConfig(**LLAMA, num_local_experts=2)
    assert_refused(
        (lambda: read(nn.Linear(2, 2)), "the model is a Linear: it must be one of GPT2LMHeadModel"),
        (lambda: read(built("Llama").model), "the model is a LlamaModel: it must be one of"),
        (lambda: read(transformers.MixtralForCausalLM(experts)), "the model is a MixtralForCausal"),
        (lambda: read(built("Llama", attention_bias=True)), "the model has attention_bias True"),
        (lambda: read(built("Llama", mlp_bias=True)), "the model has mlp_bias True"),
        (lambda: read(built("Llama", hidden_act="gelu")), "the model has hidden_act 'gelu'"),
        (lambda: read(built("Mistral")), "sliding_window 4096: the reader takes None"),
        (lambda: read(built("Qwen3", use_sliding_window=True, max_window_layers=1)),
         "the model has sliding_window 4096"),
        (lambda: read(built("Llama", rope_parameters=dynamic)), "has rope_type 'dynamic'"),
        (lambda: read(partial), "the model rotates 16 of a head's 32 elements"),
        (lambda: read(old(activation_function="relu")), "the model has activation_function 'relu'"),
        (lambda: read(old(scale_attn_by_inverse_layer_idx=True)), "scale_attn_by_inverse"),
        (lambda: read(mixed), "the model's weights are torch.float16 on cpu, torch.float32 on cpu"),
        (lambda: read(adapted), "the model's model.layers.1.mlp.up_proj is a Linear: the reader"),
        (lambda: read(meta.to("meta")), "the model's weights are on no device: load them first"),
        (lambda: read(built("Llama"), 65), "longest is 65: this model has 64 positions"),
    )  # fmt: skip


def test_a_missing_or_old_package_is_named(monkeypatch: pytest.MonkeyPatch):
    model = built("Llama")
    with monkeypatch.context() as patch:
        # transformers puts another module in its place when a class is first used.
        patch.setattr(sys.modules["transformers"], "__version__", "5.4.1")
        sentence = "transformers is 5.4.1: it must be 5.5 or later"
        assert_refused((lambda: read(model), sentence), error=MissingExtra)
    monkeypatch.setitem(sys.modules, "transformers", None)
    sentence = r"need transformers: run pip install '\.\[transformers\]' in a clone"
    assert_refused((lambda: read(model), sentence), error=MissingExtra)


@pytest.mark.parametrize("kind", TINY)
def test_greedy_tokens_are_those_of_hugging_face(kind: str):
    model, how = model_of(kind), GREEDY | MASK
    expected = model.generate(IDS, max_new_tokens=40, **how)
    found = model.generate(IDS, max_new_tokens=40, custom_generate=decode, strict=True, **how)
    assert torch.equal(found, expected)
    stops = [int(expected[0, 15]), int(expected[1, 30])]
    how |= {"eos_token_id": stops, "pad_token_id": 7}
    strict = functools.partial(decode, strict=True)
    expected = model.generate(IDS, max_new_tokens=40, **how)
    assert torch.equal(
        model.generate(IDS, max_new_tokens=40, custom_generate=strict, **how), expected
    )


def test_sampling_and_padding_on_the_right_are_passed_on():
    model = model_of("llama")
    how = {
        "max_new_tokens": 20,
        "custom_generate": decode,
        "strict": True,
        "pad_token_id": 0,
    } | MASK
    drawn = {"do_sample": True, "temperature": 0.7, "top_k": 40, "top_p": 0.9}
    torch.manual_seed(3)
    found = model.generate(IDS, **how, **drawn)
    torch.manual_seed(3)
    del drawn["do_sample"]
    expected = read(model).generate(IDS, max_new_tokens=20, **drawn)
    assert torch.equal(found, torch.cat((IDS, expected), 1))
    assert not torch.equal(found, model.generate(IDS, do_sample=False, **how))
    padded = how | {"attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2])}
    lengths = torch.tensor([6, 4], dtype=torch.int32)
    expected = read(model).generate(IDS, max_new_tokens=20, lengths=lengths)
    assert torch.equal(model.generate(IDS, do_sample=False, **padded)[:, 6:], expected)


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"num_beams": 2}, "the mode is beam_search: decode takes greedy_search and sample"),
        ({"prompt_lookup_num_tokens": 2}, "the mode is assisted_generation"),
        ({"repetition_penalty": 1.3}, "the logits processors RepetitionPenaltyLogitsProcessor"),
        ({"max_time": 1e6}, "the stopping criterion MaxTimeCriteria"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate is set"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]])}, "padding on the left or in betw"),
        ({"max_new_tokens": 80}, "86 tokens are asked for: the model has 64 positions"),
        ({"position_ids": torch.arange(1, 7)[None]}, "position_ids do not count from 0"),
        ({"output_attentions": True}, "output_attentions is given: decode does not know it"),
    ],
)
def test_anything_else_goes_to_hugging_faces_loop(how: dict, sentence: str, caplog):
    model = model_of("llama")
    how = GREEDY | {"attention_mask": MASK["attention_mask"][:1], "max_new_tokens": 5} | how

    def call(**more):
        found = model.generate(IDS[:1], **how, **more)
        return found if isinstance(found, torch.Tensor) else found.sequences

    with caplog.at_level(logging.WARNING, "tnp.llm"):
        found = call(custom_generate=decode)
    (said,) = (one.getMessage() for one in caplog.records if one.name == "tnp.llm")
    assert said.startswith("Hugging Face's own loop decodes: ") and sentence in said
    assert torch.equal(found, call())
    with pytest.raises(Unreadable, match=f"decode cannot serve this call: .*{sentence}"):
        call(custom_generate=decode, strict=True)


def test_a_users_cache_is_left_to_hugging_face(caplog):
    """Whether the cache is empty or not: the user may want to read it later."""
    model, cache = model_of("llama"), transformers.DynamicCache()
    how = GREEDY | MASK | {"max_new_tokens": 5, "custom_generate": decode}
    found = model.generate(IDS, past_key_values=cache, **how)
    assert "a cache is given: decode has its own" in caplog.text
    assert cache.get_seq_length() == 10 and torch.equal(found, model.generate(IDS, **how))


def test_a_model_that_cannot_be_read_or_is_in_training_is_left_to_hugging_face(caplog):
    how = GREEDY | {"max_new_tokens": 5}
    for model, sentence in (
        (built("Llama", attention_bias=True), "the model has attention_bias True"),
        (model_of("gpt2").train(), "the model is in training mode: call model.eval() first"),
    ):
        caplog.clear()
        assert model.generate(IDS, custom_generate=decode, **how).shape == (2, 11)
        assert sentence in caplog.text


def test_a_decoder_is_read_once_and_again_after_a_change():
    model = model_of("llama")
    with mock.patch.object(huggingface, "read", wraps=read) as reading:
        first = decoder_of(model)
        assert decoder_of(model) is first and reading.call_count == 1
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight.mul_(2.0)
        second = decoder_of(model)
        assert second is not first and decoder_of(model) is second
        model.model.norm.weight = nn.Parameter(torch.ones(64))
        assert (decoder_of(model).norm.weight == 1.0).all()
        forget(model)
        decoder_of(model)
        assert reading.call_count == 4
    died = weakref.ref(decoder_of(model))
    del model, first, second, reading  # which has seen the model
    gc.collect()
    assert died() is None
