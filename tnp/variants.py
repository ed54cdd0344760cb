"""A named variant: which implementation each operator uses, and how the step is run.

Checkpointing and CUDA graphs are not variants but switches on every one of them.
"""

from dataclasses import dataclass, fields

from tnp.inputs import require_count
from tnp.ops import registry

# Fields of a variant that name an implementation, each the operator's name in the registry.
OPERATORS = (
    "attention",
    "embedding",
    "rms_norm",
    "projection",
    "mlp",
    "mixture_heads",
    "mixture_nll",
)


@dataclass(frozen=True)
class Variant:
    """One way to run the same model.

    The fields of `OPERATORS` name an implementation of the operator, of `tnp.ops.registry`.

    `skip_unread` leaves out what no result depends on: keys and values of target rows, and all of
    the last block for context rows but their keys and values. `d_ff_storage` is the width the
    hidden layers are stored and multiplied at, zero-padded from the model's `d_ff` (None: no
    padding). `compile` runs loss and gradient through `torch.compile`. `recompute_above`: a model
    given more rows than this keeps of each block only its input and the results of attention, and
    computes the rest again in the backward pass (None: never).
    """

    name: str
    attention: str = "sdpa_flash"
    embedding: str = "torch"
    rms_norm: str = "torch"
    projection: str = "torch"
    mlp: str = "torch"
    mixture_heads: str = "torch"
    mixture_nll: str = "torch"
    skip_unread: bool = False
    d_ff_storage: int | None = None
    compile: bool = False
    recompute_above: int | None = None

    def __post_init__(self) -> None:
        for name in ("d_ff_storage", "recompute_above"):
            if getattr(self, name) is not None:
                require_count(f"{name} of variant {self.name!r}", getattr(self, name), at_least=1)
        for op, name in self.implementations().items():
            reason = registry.not_in_models(op, name)  # ValueError where there is no such name
            if reason is not None:
                raise ValueError(f"variant {self.name!r} asks for {op} {name!r}: {reason}")

    @classmethod
    def from_spec(cls, name: str, spec: dict) -> "Variant":
        """The variant `name` from its entry in config.yaml; raises ValueError on unknown keys."""
        known = [field.name for field in fields(cls) if field.name != "name"]
        for key in spec:
            if key not in known:
                raise ValueError(
                    f"variant {name!r} has an unknown key {key!r}: choose from {', '.join(known)}"
                )
        return cls(name, **spec)

    def implementations(self) -> dict[str, str]:
        """Operator → implementation."""
        return {op: getattr(self, op) for op in OPERATORS}
