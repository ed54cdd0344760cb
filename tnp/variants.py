"""A named variant: which implementation each operator uses, and how the step is run.

Checkpointing and CUDA graphs are not variants but switches on every one of them.
"""

from dataclasses import dataclass, fields, replace

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

# What a variant's `compile` may be, and the mode of `torch.compile` that it stands for. The
# compiler must not capture graphs of its own: `TrainingStep` captures the whole step.
COMPILE_MODES = {True: None, "max-autotune": "max-autotune-no-cudagraphs"}


@dataclass(frozen=True)
class Variant:
    """One way to run the same model.

    The fields of `OPERATORS` name an implementation of the operator, of `tnp.ops.registry`.

    `skip_unread` leaves out what no result depends on: keys and values of target rows, and all of
    the last block for context rows but their keys and values. `d_ff_storage` is the width the
    hidden layers are stored and multiplied at, zero-padded from the model's `d_ff` (None: no
    padding). `compile` runs loss and gradient through `torch.compile`; as "max-autotune" the
    compiler also times several kernels for every matmul and takes the fastest. `recompute_above`:
    a model given more rows than this keeps of each block only its input and the results of
    attention, and computes the rest again in the backward pass (None: never).
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
    compile: bool | str = False
    recompute_above: int | None = None

    def __post_init__(self) -> None:
        for name in ("d_ff_storage", "recompute_above"):
            if getattr(self, name) is not None:
                require_count(f"{name} of variant {self.name!r}", getattr(self, name), at_least=1)
        for op, name in self.implementations().items():
            reason = registry.not_in_models(op, name)  # ValueError where there is no such name
            if reason is not None:
                raise ValueError(f"variant {self.name!r} asks for {op} {name!r}: {reason}")
        if self.compile and self.compile not in COMPILE_MODES:
            raise ValueError(
                f"variant {self.name!r}: compile is {self.compile!r}: it must be true, false or "
                "'max-autotune'"
            )

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

    def role(self, checkpoint: bool = False, cuda_graph: bool = False) -> str:
        """A step's place in comparisons, one of `tnp.schemas.ROLES`.

        "own" where any operator is ours, "baseline" for the specification's step, else "peer".
        """
        if any(registry.role(op, name) == "own" for op, name in self.implementations().items()):
            return "own"
        plain = replace(self, name="") == Variant("") and not (checkpoint or cuda_graph)
        return "baseline" if plain else "peer"
