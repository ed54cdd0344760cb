"""Builds forms of Hugging Face's `generate`, as a user calls it with greedy choice.

hf            a cache that grows, attention by PyTorch's sdpa, nothing compiled: as it comes
hf_static     a cache of fixed size; `generate` then compiles the decoding step by itself
hf_autotuned  the same, compiled in PyTorch's mode "max-autotune"
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from torch import Tensor

from tnp.bench.language import Asked, Writer
from tnp.llm.huggingface import build, transformers
from tnp.llm.sizes import named


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


@cache
def _model(asked: Asked) -> Any:
    """Returns Hugging Face's model with the weights of the job's decoder."""
    return build(named(asked.model), asked.decoder)


def _writer(asked: Asked, **how: Any) -> Writer:
    """Returns a form whose calls of `generate` take `how`. Forms share weights and no other state.

    The model knows no token that ends a sequence.
    """
    shared = [*_model(asked).parameters(), *_model(asked).buffers()]
    model = copy.deepcopy(_model(asked), {id(x): x for x in shared})

    def write(ids: Tensor, n_new: int) -> Tensor:
        found = model.generate(ids, max_new_tokens=n_new, do_sample=False, **how)
        return found[:, ids.shape[1] :]

    return Writer(write, sum(x.nbytes for x in shared))
