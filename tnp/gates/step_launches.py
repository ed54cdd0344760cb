"""Lists launches of decoding steps for the compile gate, on tensors of the meta device.

They stand beside `tnp.gates.launches`, because no operator declares the kernels of a step.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from tnp.dispatch import devices
from tnp.dispatch.devices import Target
from tnp.gates.compile_job import TARGETS
from tnp.gates.launches import Launch
from tnp.llm import models
from tnp.llm.cache import Cache
from tnp.llm.decoder import Decoder, Linear
from tnp.llm.fused_step import FusedStep
from tnp.llm.sizes import Model, named
from tnp.llm.tokens import Tokens
from tnp.ops.quantized_linear.packing import pack
from tnp.ops.quantized_linear.quantizer import QuantizedWeight

USERS = (("decoder", "fused"),)
# Models and the bits of their weights: each kind, and each format of numbers.
MODELS = (("gpt2", 16), ("llama3_1b", 16), ("llama3_1b", 4), ("qwen3_0_6b", 8))
# Sequences, and the tokens of a page, 0 for a contiguous cache.
CACHES = ((1, 0), (1, 256), (16, 256), (17, 0))
LINEARS = ("qkv", "out", "up", "down")
GROUP, CAPACITY = 128, 1024


def step_launches() -> Iterator[Launch]:
    """Yields steps in bfloat16, whose kernels need as many registers as those in float16."""
    for name, bits in MODELS:
        decoder = _shapes(named(name), bits)
        for capability in TARGETS:
            target = devices.of_capability(capability)
            for batch, page in CACHES:
                call = partial(_launch, target, decoder, batch, page)
                yield Launch(capability, "bfloat16", USERS, call)


def _shapes(model: Model, bits: int) -> Decoder:
    """Returns a decoder on the meta device, with the first of all layers and one of the others.

    Only the first adds no update. With codes the head has 8 bits.
    """
    sizes = replace(model.sizes, n_layers=2, longest=CAPACITY)
    decoder = models.draw(replace(model, sizes=sizes), dtype=torch.bfloat16, device="meta")

    def coded(linear: Linear, bits: int) -> Linear:
        n_out, n_in = linear.shape
        codes = pack(torch.empty(n_out, n_in, dtype=torch.uint8, device="meta"), bits)
        scales = linear.weight.new_empty(n_out, n_in // GROUP)
        return replace(linear, weight=QuantizedWeight(codes, scales))

    if bits == 16:
        return decoder
    layers = tuple(
        replace(layer, **{name: coded(getattr(layer, name), bits) for name in LINEARS})
        for layer in decoder.layers
    )
    return replace(decoder, layers=layers, head=coded(decoder.head, 8))


def _launch(target: Target, decoder: Decoder, batch: int, page: int) -> None:
    """Launches a step that returns logits, and one that chooses tokens.

    Args:
        target: the GPU that meta tensors stand for.
        decoder: the decoder.
        batch: how many sequences.
        page: tokens of a page, or 0 for a contiguous cache.
    """
    cache, s = Cache(decoder, batch, CAPACITY), decoder.sizes
    if page:  # as `Cache.of_pages` has it; a pool counts its pages' owners, which meta cannot
        shape = s.n_layers, batch * CAPACITY // page, page, s.n_kv_heads, s.head_dim
        cache.keys = cache.values = decoder.embedding.new_empty(shape).transpose(2, 3)
        cache.page_table = cache.lengths.new_empty(batch, CAPACITY // page)
    with devices.on_meta(target):
        step = FusedStep(decoder)
        step(torch.empty(batch, dtype=torch.int64, device="meta"), cache)
        step.follow(Tokens(batch, 1, (1,), 0, torch.device("meta")), cache)
