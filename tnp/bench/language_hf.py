"""Builds forms of Hugging Face's generation, as a user calls it with greedy choice.

hf            a cache that grows, attention by PyTorch's sdpa, nothing compiled: as it comes
hf_static     a cache of fixed size; `generate` then compiles the decoding step by itself
hf_autotuned  the same, compiled in PyTorch's mode "max-autotune"
hf_batched    continuous batching by a manager that all calls share: a cache in pages, CUDA graphs
"""

from __future__ import annotations

import copy
import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tnp.bench.language import Asked, Writer
from tnp.experiment.failures import Unsupported
from tnp.llm.huggingface import build, transformers
from tnp.llm.sizes import named

MOST_AT_ONCE = 4096  # tokens of prompts that `hf_batched` computes in one step
# Tokens of all sequences in `hf_batched` without flash attention: each query meets the keys of all.
MOST_MASKED = 16_384


def dynamic(asked: Asked) -> Writer:
    """Returns form `hf`."""
    return _writer(asked)


def static(asked: Asked) -> Writer:
    """Returns form `hf_static`."""
    return _writer(asked, cache_implementation="static")


def autotuned(asked: Asked) -> Writer:
    """Returns form `hf_autotuned`."""
    config = transformers().generation.CompileConfig(mode="max-autotune")
    return _writer(asked, cache_implementation="static", compile_config=config)


def batched(asked: Asked) -> Writer:
    """Returns form `hf_batched`, whose thread begins with the first call.

    The pool has pages for one call. All decoding steps are padded to one size, so that they replay
    one graph. Sequences share no pages: the prompts of a later call would need no computation.

    Raises Unsupported for more than `MOST_MASKED` tokens without flash attention.
    """
    hf, model = transformers(), copy.deepcopy(_model(asked), _shared(asked))
    config = hf.ContinuousBatchingConfig(
        allow_block_sharing=False,
        use_cuda_graph=asked.device.type == "cuda",
        max_requests_per_batch=asked.batch,
        max_batch_tokens=min(asked.batch * asked.n_prompt, max(asked.batch, MOST_AT_ONCE)),
        q_padding_interval_size=asked.batch,
        safety_margin=0.0,
    )
    config.num_blocks = asked.batch * math.ceil(asked.length / config.block_size)
    config.kv_padding_interval_size = config.num_blocks * config.block_size
    greedy = hf.GenerationConfig(do_sample=False, eos_token_id=-1)
    manager = model.init_continuous_batching(greedy, config)
    n_tokens = asked.batch * asked.length
    if "flash" not in model.config._attn_implementation and n_tokens > MOST_MASKED:
        raise Unsupported(
            f"without flash-attn each query of continuous batching meets the keys of all sequences:"
            f" they have {n_tokens:,} tokens, and the form takes at most {MOST_MASKED:,}"
        )

    def write(ids: Tensor, n_new: int) -> Tensor:
        if not manager.is_running():
            manager.start()
        names = manager.add_requests(ids.tolist(), max_new_tokens=n_new)
        found: dict[str, list[int]] = {}
        while len(found) < len(names):
            result = manager.get_result(timeout=1)
            if result is None and manager.is_running():
                continue
            if result is None or result.error is not None:
                why = result.error if result else manager.background_thread_status.fatal_error
                raise RuntimeError(f"continuous batching failed: {why}")
            if result.request_id in names:  # not one that an earlier, failed call has left
                found[result.request_id] = result.generated_tokens
        return torch.tensor([found[name] for name in names], device=ids.device)

    return Writer(write, sum(x.nbytes for x in _shared(asked).values()), close=manager.destroy)


@cache
def _model(asked: Asked) -> Any:
    """Returns Hugging Face's model with the weights of the job's decoder."""
    return build(named(asked.model), asked.decoder)


def _shared(asked: Asked) -> dict[int, Tensor]:
    """Returns the memo with which `copy.deepcopy` keeps the model's tensors."""
    return {id(x): x for x in (*_model(asked).parameters(), *_model(asked).buffers())}


def _writer(asked: Asked, **how: Any) -> Writer:
    """Returns a form whose calls of `generate` take `how`. Forms share weights and no other state.

    The model knows no token that ends a sequence.
    """
    model = copy.deepcopy(_model(asked), _shared(asked))

    def write(ids: Tensor, n_new: int) -> Tensor:
        found = model.generate(ids, max_new_tokens=n_new, do_sample=False, **how)
        return found[:, ids.shape[1] :]

    return Writer(write, sum(x.nbytes for x in _shared(asked).values()))
