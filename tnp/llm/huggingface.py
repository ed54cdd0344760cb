"""Reads decoders from Hugging Face's models, and decodes behind their `generate`.

`model.generate(ids, custom_generate=decode)` prepares everything and then calls `decode` in place
of its own loop. `build` makes a model with a decoder's weights, for gates and benchmarks.

This is the only module that imports transformers, and it does so inside of functions. It reads
weights and configuration and hooks into nothing, so it does not depend on how layers are called.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from tnp.llm.decoder import FLOATS, Decoder, Layer, Linear, Norm, Sizes, rotation_tables
from tnp.llm.generate import generate
from tnp.llm.models import Model
from tnp.llm.steps import AUTO
from tnp.util.checks import require_count
from tnp.util.extras import MissingExtra, install

LOG = logging.getLogger("tnp.llm")
OLDEST = (5, 5)  # transformers: the first with `rope_parameters` and these names in all three kinds
# The class of each kind that is read, by the configuration's `model_type`.
CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Rotations whose frequencies do not depend on how long a sequence is.
ROTATIONS = ("default", "linear", "llama3", "yarn")
# Maps a field of a configuration to the values that the reader supports. A missing field passes.
KNOWN = {
    "hidden_act": ("silu", "swish"),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "sliding_window": (None,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
    "quantization_config": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}


class Unreadable(ValueError):
    """Says in one sentence why a model cannot be read."""


def transformers() -> ModuleType:
    """Returns the package. Raises MissingExtra if it is missing or older than `OLDEST`."""
    try:
        import transformers
    except ImportError:
        raise MissingExtra(
            f"Hugging Face's models need transformers: run {install('transformers')}"
        ) from None
    found = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if found < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise MissingExtra(
            f"transformers is {transformers.__version__}: it must be {oldest} or later, run "
            f"{install('transformers')}"
        )
    return transformers


def read(model: Any, longest: int | None = None) -> Decoder:
    """Returns the decoder of a Hugging Face model: GPT-2, Llama, Mistral or Qwen3.

    It shares the model's memory, except for q, k and v, gate and up, and GPT-2's linear layers,
    which are copied. The rotation's tables come from the model's own inverse frequencies.

    Args:
        model: one of `CLASSES`, with all weights in one float dtype on one device.
        longest: the most tokens of a sequence; None: `max_position_embeddings`.

    Raises:
        Unreadable: the model is of another kind, or has something that the reader does not know.
        MissingExtra: transformers is missing or too old.
    """
    transformers()
    require_readable(model)
    config = model.config
    most = config.max_position_embeddings
    longest = most if longest is None else require_count("longest", longest, 1)
    if longest > most:
        raise ValueError(f"longest is {longest}: this model has {most} positions")
    with torch.no_grad():
        return (_read_gpt2 if config.model_type == "gpt2" else _read_llama)(model, longest)


def require_readable(model: Any) -> None:
    """Raises Unreadable with the first reason why `read` cannot read the model."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if type(model).__name__ != CLASSES.get(kind):
        classes = ", ".join(CLASSES.values())
        raise Unreadable(f"the model is a {type(model).__name__}: it must be one of {classes}")
    for name, values in KNOWN.items():
        found = getattr(config, name, values[0])
        if found not in values:
            raise Unreadable(f"the model has {name} {found!r}: the reader takes {values[0]!r} only")
    for sliding in getattr(config, "layer_types", None) or ():
        if sliding != "full_attention":
            raise Unreadable(f"the model has a layer of {sliding}: the reader takes full attention")
    rotation = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotation not in ROTATIONS:
        raise Unreadable(
            f"the model has rope_type {rotation!r}: the reader takes {', '.join(ROTATIONS)}"
        )
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and not _is_known(module):
            raise Unreadable(
                f"the model's {name} is a {type(module).__name__}: the reader takes Hugging Face's "
                "own layers with float weights"
            )
    weights = dict(model.named_parameters())
    for name in weights:
        if name.endswith(".bias") and kind != "gpt2" or name == "lm_head.bias":
            raise Unreadable(f"the model has {name}: the reader knows no bias there")
    places = {(x.dtype, x.device) for x in weights.values()}
    if len(places) > 1 or next(iter(places))[0] not in FLOATS:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in places))
        raise Unreadable(f"the model's weights are {found}: they must have one float dtype")
    if next(iter(places))[1].type == "meta":
        raise Unreadable("the model's weights are on no device: load them first")


# Classes of transformers that hold weights, besides PyTorch's own.
_PARTS = ("Conv1D", "LlamaRMSNorm", "MistralRMSNorm", "Qwen3RMSNorm")


def _is_known(module: nn.Module) -> bool:
    """Returns whether a module with a weight computes what the reader takes it for.

    Adapters and quantized layers, which may have the same names, do not.
    """
    kind = type(module)
    if kind.__module__.startswith("transformers."):
        return kind.__name__ in _PARTS
    return kind in (nn.Linear, nn.Embedding, nn.LayerNorm)


def _read_gpt2(model: Any, longest: int) -> Decoder:
    config, body = model.config, model.transformer

    def turned(module: Any) -> Linear:  # a Conv1D keeps [n_in, n_out]
        return Linear(module.weight.detach().t().contiguous(), module.bias.detach())

    def norm(module: Any) -> Norm:
        return Norm(module.weight.detach(), module.bias.detach())

    embedding = body.wte.weight.detach()
    sizes = Sizes(
        "gpt2", *embedding.shape, config.n_layer, config.n_head, config.n_head,
        config.n_embd // config.n_head, body.h[0].mlp.c_fc.weight.shape[1],
        config.layer_norm_epsilon, longest, _is_tied(model, body.wte),
    )  # fmt: skip
    layers = tuple(
        Layer(
            norm(block.ln_1), turned(block.attn.c_attn), turned(block.attn.c_proj),
            norm(block.ln_2), turned(block.mlp.c_fc), turned(block.mlp.c_proj),
        )
        for block in body.h
    )  # fmt: skip
    head = Linear(embedding if sizes.tied else model.lm_head.weight.detach())
    positions = body.wpe.weight.detach()[:longest]
    return Decoder(sizes, embedding, positions, layers, norm(body.ln_f), head, None, None)


def _read_llama(model: Any, longest: int) -> Decoder:
    config, body = model.config, model.model

    def joined(*modules: Any) -> Linear:
        return Linear(torch.cat([module.weight.detach() for module in modules]))

    def one(module: Any) -> Linear:
        return Linear(module.weight.detach())

    def norm(module: Any) -> Norm:
        return Norm(module.weight.detach())

    kind = "qwen3" if config.model_type == "qwen3" else "llama"
    head_dim = body.layers[0].self_attn.head_dim
    embedding, rotation = body.embed_tokens.weight.detach(), body.rotary_emb
    if len(rotation.inv_freq) != head_dim // 2:
        raise Unreadable(
            f"the model rotates {2 * len(rotation.inv_freq)} of a head's {head_dim} elements: the "
            "reader takes rotations of whole heads"
        )
    sizes = Sizes(
        kind, *embedding.shape, config.num_hidden_layers, config.num_attention_heads,
        config.num_key_value_heads, head_dim, config.intermediate_size, config.rms_norm_eps,
        longest, _is_tied(model, body.embed_tokens),
    )  # fmt: skip

    def layer(block: Any) -> Layer:
        own, mlp = block.self_attn, block.mlp
        of_head = (norm(own.q_norm), norm(own.k_norm)) if kind == "qwen3" else ()
        return Layer(
            norm(block.input_layernorm), joined(own.q_proj, own.k_proj, own.v_proj),
            one(own.o_proj), norm(block.post_attention_layernorm),
            joined(mlp.gate_proj, mlp.up_proj), one(mlp.down_proj), *of_head,
        )  # fmt: skip

    tables = rotation_tables(rotation.inv_freq, longest, rotation.attention_scaling)
    head = Linear(embedding) if sizes.tied else one(model.lm_head)
    layers = tuple(map(layer, body.layers))
    return Decoder(sizes, embedding, None, layers, norm(body.norm), head, *tables)


def _is_tied(model: Any, embedding: nn.Embedding) -> bool:
    return model.lm_head.weight is embedding.weight


def decode(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    strict: bool = False,
    implementation: str = AUTO,
    **model_kwargs: Any,
) -> Tensor:
    """Generates as `model.generate(ids, custom_generate=decode)` asks, by `tnp.llm.generate`.

    It takes greedy decoding and sampling with temperature, top_k and top_p, several end tokens, and
    prompts padded on the right. Random tokens come from PyTorch's generator, but are not those of
    Hugging Face's loop. Anything else goes to that loop, with one sentence to logger "tnp.llm".

    The decoder is read at the first call and kept as long as the model. It is read again once a
    weight was replaced, or changed by an operation of PyTorch's, but not if somebody wrote through
    `weight.data`: call `forget(model)` then.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs:
            what `generate` passes.
        strict: whether to refuse what Hugging Face's loop would have to do. `generate` takes
            `strict=True` beside `custom_generate=decode`.
        implementation: the step's, likewise.

    Returns:
        the prompts and new tokens behind them, [B, T + n].

    Raises:
        Unreadable: `strict` is True, and there is a reason against decoding here.
    """
    asked = stopping_criteria.max_length
    reason = _against(
        model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
    )
    if reason is None:
        try:
            decoder = decoder_of(model)
        except Unreadable as error:
            reason = str(error)
    if reason is None and asked > decoder.sizes.longest:
        reason = f"{asked} tokens are asked for: the model has {decoder.sizes.longest} positions"
    if reason is not None:
        if strict:
            raise Unreadable(f"decode cannot serve this call: {reason}")
        LOG.warning("Hugging Face's own loop decodes: %s", reason)
        return _their_loop(
            model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
        )
    how: dict[str, Any] = {}
    if generation_config.do_sample:
        found = {type(one).__name__: one for one in logits_processor}
        how["temperature"] = 1.0
        for kind, name in WARPERS.items():
            if kind in found:
                how[name] = getattr(found[kind], name)
    stops = [one for one in stopping_criteria if hasattr(one, "eos_token_id")]
    if stops:
        how["eos_token_id"] = stops[0].eos_token_id.flatten().tolist()
        how["pad_token_id"] = generation_config.pad_token_id
    mask = model_kwargs.get("attention_mask")
    lengths = None if mask is None or mask.all() else mask.sum(1, dtype=torch.int32)
    new = generate(
        decoder, input_ids, max_new_tokens=asked - input_ids.shape[1], lengths=lengths,
        implementation=implementation, **how,
    )  # fmt: skip
    return torch.cat((input_ids, new), 1)


# Maps each logits processor that `decode` takes, in the order that it must have, to its attribute.
WARPERS = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
}
CRITERIA = ("MaxLengthCriteria", "EosTokenCriteria")
MODES = ("greedy_search", "sample")
# Arguments that `decode` ignores, because they do not change the tokens.
IGNORED = ("use_cache", "logits_to_keep", "tokenizer")


def _against(
    model: Any,
    ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    config: Any,
    kwargs: dict[str, Any],
) -> str | None:
    """Returns the first reason why `decode` cannot serve a prepared call, or None."""
    if model.training:
        return "the model is in training mode: call model.eval() first"
    mode = config.get_generation_mode(kwargs.get("assistant_model")).value
    if mode not in MODES:
        return f"the mode is {mode}: decode takes {' and '.join(MODES)}"
    if config.return_dict_in_generate:
        return "return_dict_in_generate is set: decode returns ids alone"
    if config.cache_implementation not in (None, "dynamic", "static"):
        return f"cache_implementation is {config.cache_implementation!r}: decode has its own cache"
    warpers = [type(one).__name__ for one in logits_processor]
    known = [kind for kind in WARPERS if kind in warpers] if config.do_sample else []
    if warpers != known:
        return f"there are the logits processors {', '.join(warpers)}: decode takes " + (
            f"{', '.join(WARPERS)} in this order" if config.do_sample else "none without sampling"
        )
    for one in logits_processor:
        keeps, fills = (
            getattr(one, "min_tokens_to_keep", 1),
            getattr(one, "filter_value", -math.inf),
        )
        if (keeps, fills) != (1, -math.inf):
            return f"{type(one).__name__} keeps {keeps} tokens and fills {fills}"
    for one in stopping_criteria:
        if type(one).__name__ not in CRITERIA:
            return f"there is the stopping criterion {type(one).__name__}: decode takes " + (
                " and ".join(CRITERIA)
            )
    if stopping_criteria.max_length is None:
        return "there is no limit of tokens: give max_new_tokens"
    if ids.dtype != torch.int64 or ids.dim() != 2 or not ids.numel():
        return f"input_ids is {ids.dtype} {tuple(ids.shape)}: decode takes int64 [B, T]"
    if ids.device != model.device:
        return f"input_ids is on {ids.device} and the model on {model.device}"
    return _against_arguments(ids, kwargs)


def _against_arguments(ids: Tensor, kwargs: dict[str, Any]) -> str | None:
    """Returns the first reason that lies in the model's arguments, or None.

    A cache is known by its methods, because its name differs between versions.
    """
    mask, n_tokens = kwargs.get("attention_mask"), ids.shape[1]
    places = torch.arange(n_tokens, device=ids.device)
    if mask is not None:
        if mask.shape != ids.shape:
            return f"attention_mask has shape {tuple(mask.shape)}: it must be {tuple(ids.shape)}"
        if not torch.equal(mask.bool(), places < mask.bool().sum(1, keepdim=True)):
            return (
                "attention_mask has padding on the left or in between: decode takes it on the right"
            )
        if not mask.bool().any(1).all():
            return "attention_mask has a sequence without tokens"
    for name, value in kwargs.items():
        if name in IGNORED or name == "attention_mask" or value is None or value is False:
            continue
        if callable(getattr(value, "get_seq_length", None)):
            if value.get_seq_length() or getattr(value, "_is_user_defined", False):
                return "a cache is given: decode has its own"
        elif name == "position_ids":
            wrong = value != places
            if (wrong if mask is None else wrong & mask.bool()).any():
                return "position_ids do not count from 0"
        else:
            return f"{name} is given: decode does not know it"
    return None


def _their_loop(
    model: Any,
    ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    config: Any,
    kwargs: dict[str, Any],
) -> Any:
    """Calls Hugging Face's own loop with a prepared call."""
    from transformers.generation.utils import GENERATION_MODES_MAPPING

    mode = config.get_generation_mode(kwargs.get("assistant_model"))
    name = GENERATION_MODES_MAPPING[mode]
    if not hasattr(type(model), name):
        raise Unreadable(
            f"the mode is {mode.value}: transformers has no loop of its own for it, call generate "
            "without custom_generate"
        )
    if mode.value == "assisted_generation":
        kwargs = {"inputs_tensor": ids, **kwargs}
    return getattr(model, name)(
        ids, logits_processor=logits_processor, stopping_criteria=stopping_criteria,
        generation_config=config, **kwargs,
    )  # fmt: skip


_KEPT: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by model: the state of its weights, decoder


def decoder_of(model: Any) -> Decoder:
    """Returns the model's decoder, which is kept as `decode` says.

    Raises:
        Unreadable, MissingExtra: as `read`.
    """
    state = tuple(
        (name, x.data_ptr(), None if x.is_inference() else x._version, x.dtype, x.device)
        for name, x in model.named_parameters()
    )
    known, decoder = _KEPT.get(model, (None, None))
    if known != state:
        decoder = None  # its memory is free for the next one
        forget(model)
        decoder = read(model)
        _KEPT[model] = state, decoder
    return decoder


def forget(model: Any) -> None:
    """Forgets the model's decoder, so that `decode` reads its weights again."""
    _KEPT.pop(model, None)


def build(model: Model, decoder: Decoder) -> Any:
    """Returns Hugging Face's model with the weights of `decoder`, which has been drawn for `model`.

    It is in evaluation mode, in the decoder's dtype and on its device, and has weights of its own.

    Raises:
        MissingExtra: transformers is missing or too old.
    """
    package, s = transformers(), decoder.sizes
    common = {"vocab_size": s.vocab, "tie_word_embeddings": s.tied}
    common |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if s.kind == "gpt2":
        config = package.GPT2Config(
            n_positions=s.longest, n_embd=s.width, n_layer=s.n_layers, n_head=s.n_heads,
            n_inner=s.d_ff, layer_norm_epsilon=s.eps, **common,
        )  # fmt: skip
    else:
        rope = {"rope_type": "default", "rope_theta": model.theta}
        if model.stretch is not None:
            rope |= {
                "rope_type": "llama3", "factor": model.stretch.factor,
                "low_freq_factor": model.stretch.low, "high_freq_factor": model.stretch.high,
                "original_max_position_embeddings": model.stretch.original,
            }  # fmt: skip
        kind = package.Qwen3Config if s.kind == "qwen3" else package.LlamaConfig
        config = kind(
            hidden_size=s.width, intermediate_size=s.d_ff, num_hidden_layers=s.n_layers,
            num_attention_heads=s.n_heads, num_key_value_heads=s.n_kv_heads, head_dim=s.head_dim,
            rms_norm_eps=s.eps, max_position_embeddings=s.longest, rope_parameters=rope, **common,
        )  # fmt: skip
    default = torch.get_default_dtype()
    try:  # a cast of the whole model would round its inverse frequencies too
        torch.set_default_dtype(decoder.dtype)
        with torch.device(decoder.device):
            made = getattr(package, CLASSES[s.kind])(config)
    finally:
        torch.set_default_dtype(default)
    with torch.no_grad():
        for name, x in _weights(decoder):
            made.get_parameter(name).copy_(x)
    return made.eval()


def _weights(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yields Hugging Face's name of each weight, and its value."""
    s = decoder.sizes
    heads, kv_heads = s.n_heads * s.head_dim, s.n_kv_heads * s.head_dim
    if s.kind == "gpt2":
        norms = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}
        linears = {"qkv": "attn.c_attn", "out": "attn.c_proj"}
        linears |= {"up": "mlp.c_fc", "down": "mlp.c_proj"}
        yield "transformer.wte.weight", decoder.embedding
        yield "transformer.wpe.weight", decoder.positions
        yield "transformer.ln_f.weight", decoder.norm.weight
        yield "transformer.ln_f.bias", decoder.norm.bias
        for i, layer in enumerate(decoder.layers):
            for name, theirs in norms.items():
                yield f"transformer.h.{i}.{theirs}.weight", getattr(layer, name).weight
                yield f"transformer.h.{i}.{theirs}.bias", getattr(layer, name).bias
            for name, theirs in linears.items():
                yield f"transformer.h.{i}.{theirs}.weight", getattr(layer, name).weight.t()
                yield f"transformer.h.{i}.{theirs}.bias", getattr(layer, name).bias
    else:
        yield "model.embed_tokens.weight", decoder.embedding
        yield "model.norm.weight", decoder.norm.weight
        for i, layer in enumerate(decoder.layers):
            at, qkv = f"model.layers.{i}.", layer.qkv.weight
            yield f"{at}input_layernorm.weight", layer.attention_norm.weight
            yield f"{at}post_attention_layernorm.weight", layer.mlp_norm.weight
            for name, x in zip("qkv", qkv.split((heads, kv_heads, kv_heads)), strict=True):
                yield f"{at}self_attn.{name}_proj.weight", x
            yield f"{at}self_attn.o_proj.weight", layer.out.weight
            for name, x in zip(("gate", "up"), layer.up.weight.chunk(2), strict=True):
                yield f"{at}mlp.{name}_proj.weight", x
            yield f"{at}mlp.down_proj.weight", layer.down.weight
            for name in ("q_norm", "k_norm") if s.kind == "qwen3" else ():
                yield f"{at}self_attn.{name}.weight", getattr(layer, name).weight
    if not s.tied:
        yield "lm_head.weight", decoder.head.weight
