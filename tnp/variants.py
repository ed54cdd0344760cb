"""A named variant: which implementation each operator uses, and how the step is run.

Checkpointing and CUDA graphs are not variants but switches on every one of them.
"""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Variant:
    """One way to run the same model.

    `attention` is an implementation of `tnp.ops.attention`. `d_ff_storage` is the width the hidden
    layers are stored and multiplied at, zero-padded from the model's `d_ff` (None: no padding).
    `compile` runs loss and gradient through `torch.compile`.
    """

    name: str
    attention: str = "sdpa_flash"
    d_ff_storage: int | None = None
    compile: bool = False

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
