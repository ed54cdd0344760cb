"""Declares the forms in which a language model is timed. Imports no torch: a plan reads them.

A form is one way to write new tokens after a prompt. `FORMS` is the only list of them.
"""

from dataclasses import dataclass

from tnp.llm.sizes import MODELS
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
    that it can have, and `packages` the distributions that it needs beside PyTorch.
    `implementation` is that of our decoder's step, a key of `tnp.llm.steps.STEPS`. Gates of the
    model's kind prove it. It is "" for a form that is not ours.
    """

    name: str
    role: str
    start: str
    weights: tuple[str, ...] = WEIGHTS
    packages: tuple[str, ...] = ()
    implementation: str = ""

    @property
    def operators(self) -> dict[str, str]:
        """Returns {operator: implementation} that gates' checks must be about."""
        return {"decoder": self.implementation} if self.implementation else {}

    def gates(self, model: str) -> list[str]:
        """Returns the gates that the form waits for if it runs `model`."""
        kind = MODELS[model].sizes.kind
        return [f"{gate}--{kind}" for gate in ("decoder", "decode")] if self.implementation else []


FORMS = {
    form.name: form
    for form in (
        Form("hf", BASELINE, "tnp.bench.language_hf:dynamic", (BF16,), ("transformers",)),
        Form("hf_static", PEER, "tnp.bench.language_hf:static", (BF16,), ("transformers",)),
        Form("hf_autotuned", PEER, "tnp.bench.language_hf:autotuned", (BF16,), ("transformers",)),
        Form("hf_batched", PEER, "tnp.bench.language_hf:batched", (BF16,), ("transformers",)),
        Form("compiled_decoder", PEER, "tnp.bench.compiled_decoder:compiled"),
        Form("vllm", PEER, "tnp.bench.language:vllm", packages=("vllm",)),
        Form("ours", OWN, "tnp.bench.language:ours", implementation="fused"),
    )
}
