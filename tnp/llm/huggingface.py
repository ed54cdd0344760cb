"""Reads decoders from Hugging Face's models, and builds such models with a decoder's weights.

This is the only module that imports transformers, and it does so inside of functions. It reads
weights and configuration and hooks into nothing, so it does not depend on how layers are called.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from tnp.llm.decoder import Decoder, Layer, Linear, Norm, Sizes, rotation_tables
from tnp.llm.models import Model
from tnp.util.checks import require_count
from tnp.util.extras import MissingExtra, install

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
# What a configuration may say, by name: the values that the reader knows. A name that a
# configuration does not have passes.
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
        if isinstance(weight, Tensor) and type(module).__name__ not in _PARTS:
            raise Unreadable(
                f"the model's {name} is a {type(module).__name__}: the reader takes Hugging Face's "
                "own layers with float weights"
            )
    weights = dict(model.named_parameters())
    for name in weights:
        if name.endswith(".bias") and kind != "gpt2" or name == "lm_head.bias":
            raise Unreadable(f"the model has {name}: the reader knows no bias there")
    places = {(x.dtype, x.device) for x in weights.values()}
    if len(places) > 1 or not next(iter(places))[0].is_floating_point:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in places))
        raise Unreadable(f"the model's weights are {found}: they must have one float dtype")
    if next(iter(places))[1].type == "meta":
        raise Unreadable("the model's weights are on no device: load them first")


# Classes of the modules that hold weights.
_PARTS = (
    "Linear", "Conv1D", "Embedding", "LayerNorm", "LlamaRMSNorm", "MistralRMSNorm", "Qwen3RMSNorm",
)  # fmt: skip


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
