"""Declares the forms in which a language model is timed. Imports no torch: a plan reads them.

A form is one way to write new tokens after a prompt. `FORMS` is the only list of them.
"""

from dataclasses import dataclass

from tnp.store.schemas import ROLES

BASELINE, PEER, OWN = ROLES
BF16, INT8, INT4 = WEIGHTS = ("bf16", "int8", "int4")
# Bits of linear layers' weights and of the head's, in groups of `GROUP` with a 16-bit scale each.
GROUP = 128
BITS = {BF16: (16, 16), INT8: (8, 8), INT4: (4, 8)}


@dataclass(frozen=True)
class Form:
    """Declares one form.

    `start` names the function that builds it, as "module:function". It is called with a
    `tnp.bench.language.Asked` and returns a `tnp.bench.language.Writer`. `weights` are the formats
    that it can have, `packages` the distributions that it needs beside PyTorch, and `gates` what it
    waits for.
    """

    name: str
    role: str
    start: str
    weights: tuple[str, ...] = WEIGHTS
    packages: tuple[str, ...] = ()
    gates: tuple[str, ...] = ()


FORMS = {
    form.name: form
    for form in (
        Form("hf", BASELINE, "tnp.bench.language_hf:dynamic", (BF16,), ("transformers",)),
        Form("hf_static", PEER, "tnp.bench.language_hf:static", (BF16,), ("transformers",)),
        Form("hf_autotuned", PEER, "tnp.bench.language_hf:autotuned", (BF16,), ("transformers",)),
        Form("compiled_decoder", PEER, "tnp.bench.compiled_decoder:compiled"),
        Form("vllm", PEER, "tnp.bench.language:vllm", packages=("vllm",)),
        Form("ours", OWN, "tnp.bench.language:ours"),
    )
}
