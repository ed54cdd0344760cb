"""Defines variants: a variant says which implementation each operator uses, and how a step runs.

Checkpointing and CUDA graphs are no part of a variant: they are switches for every variant.
"""

import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

from tnp.dispatch.devices import Target
from tnp.dispatch.registry import AUTO, LAYERS, block_of, catalog, is_automatic
from tnp.dispatch.spec import OWN, Call, Implementation, Operator
from tnp.util.checks import require_count

FOR_BENCHMARKS = "it is for benchmarks: choose 'torch' and run the model through torch.compile"

# A variant's `compile` → mode of `torch.compile`. The compiler must not capture CUDA graphs itself,
# because `TrainingStep` captures the whole step.
COMPILE_MODES = {True: None, "max-autotune": "max-autotune-no-cudagraphs"}

NAMED = Path(__file__).with_name("variants.toml")
STORAGE_MULTIPLE = 128  # the MLP's kernels for Hopper take only hidden widths of this multiple
# A width is padded by at most this part of itself, so every width from 1,017 on is padded. For a
# narrower layer, padding may cost more than those kernels save: 64 would be stored as 128.
MOST_PADDING = 1 / 8


@dataclass(frozen=True)
class Variant:
    """Chooses one way to run the same model.

    The fields named in `FAMILIES` choose the implementation of a family of operators. The family
    `rms_norm`, for example, is the norm alone and the norm after a residual addition. Each field
    also takes "torch" for PyTorch's form and "own" for the best of ours. It then holds the real
    name.

    Args:
        skip_unread: leave out all that no result depends on. That is keys and values of target
            rows, and, in the last block, all of a context row except its key and value.
        centred_keys: subtract from a sample's keys the part that they share (see `project_qkv`).
            Without it, gradients of queries are inaccurate in 16 bits. It needs `skip_unread`,
            because otherwise rows that are no keys are projected with the keys.
        pack: only attention pads samples in a training step (`tnp.model.packing`). This is for
            batches whose samples differ in size.
        d_ff_storage: width at which hidden layers are stored and multiplied, zero-padded from the
            model's `d_ff`. True stands for `storage_width(d_ff)`, and None for no padding.
        compile: run loss and gradient through `torch.compile`. With "max-autotune" the compiler
            times several kernels for each matmul and takes the fastest.
        recompute_above: a model given more rows than this computes most of each block again in the
            backward pass. It keeps only the block's input and the results of attention. None:
            never.
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
    centred_keys: bool = False
    pack: bool = False
    d_ff_storage: int | bool | None = None
    compile: bool | str = False
    recompute_above: int | None = None

    def __post_init__(self) -> None:
        for family in FAMILIES:  # recorded rows need the real name, not "own" or "torch"
            first, *_ = catalog().family(family)
            real = catalog().real(first.name, getattr(self, family))
            object.__setattr__(self, family, real)
        for name in ("d_ff_storage", "recompute_above"):
            value = getattr(self, name)
            if value is not None and not (name == "d_ff_storage" and value is True):
                count = require_count(f"{name} of variant {self.name!r}", value, at_least=1)
                object.__setattr__(self, name, count)
        if self.centred_keys and not self.skip_unread:
            raise ValueError(f"variant {self.name!r}: centred_keys needs skip_unread")
        if self.centred_keys and self.pack:
            raise ValueError(
                f"variant {self.name!r}: centred_keys takes a mean of each sample's rows, which "
                "pack puts behind one another: choose one of the two"
            )
        for family, name in self.implementations().items():
            reason = not_in_models(family, name)
            if reason is not None:
                raise ValueError(f"variant {self.name!r} asks for {family} {name!r}: {reason}")
        if self.compile and self.compile not in COMPILE_MODES:
            raise ValueError(
                f"variant {self.name!r}: compile is {self.compile!r}: it must be true, false or "
                "'max-autotune'"
            )

    def storage(self, d_ff: int) -> int:
        """Returns the width at which this variant stores hidden layers of `d_ff` units.

        Raises:
            ValueError: `d_ff_storage` is below `d_ff`, or above its next multiple of 128.
        """
        if self.d_ff_storage is None:
            return d_ff
        if self.d_ff_storage is True:
            return storage_width(d_ff)
        most = most_storage(d_ff)
        if not d_ff <= self.d_ff_storage <= most:
            raise ValueError(
                f"variant {self.name!r} stores d_ff_storage {self.d_ff_storage}: it must be from "
                f"{d_ff}, the model's d_ff, to {most}, or True, which chooses it"
            )
        return self.d_ff_storage

    @property
    def base2(self) -> bool:
        """Returns True where the projection of queries includes the factor of attention's scores.

        It is False where the projection is not ours: that variant is code that a user of PyTorch
        would write. It is also False where the implementation of attention does not take it.
        """
        of_ours = catalog().role("project_qkv", self.projection) == OWN
        if not of_ours or is_automatic(self.attention):
            return of_ours
        own = catalog().listed("attention", self.attention).own
        return own is None or "base2" in own.options

    @property
    def decode_attention(self) -> str:
        """Returns the implementation of `decode_attention` that goes with `attention`."""
        if is_automatic(self.attention):
            return AUTO
        return "triton" if catalog().role("attention", self.attention) == OWN else "sdpa"

    @property
    def buffered_attention(self) -> str | None:
        """Returns the implementation of `buffered_attention`, which replaces attention's calls at a
        buffer.

        It is None where attention is not ours, is in 8 bits, or is only for comparison. It is also
        None where tables choose attention, because they do not know the replaced calls.
        """
        if is_automatic(self.attention):
            return None
        own = catalog().listed("attention", self.attention).own
        of_ours = own is not None and own.provider == OWN and own.chosen_from
        return "triton" if of_ours else None

    @property
    def rms_norm_linear(self) -> str | None:
        """Returns the implementation of `rms_norm_linear`.

        That operator replaces the norm, the projection and the MLP's first half. It is None where
        one of these is not ours, or is in 8 bits.
        """
        replaced = {"rms_norm": self.rms_norm, "linear": self.projection, "mlp": self.mlp}
        for op, name in replaced.items():
            if name != AUTO:
                of_ours = not is_automatic(name) and catalog().role(op, name) == OWN
                if not of_ours or catalog().listed(op, name).own.precision:
                    return None
        return AUTO if self.rms_norm == AUTO else "triton"

    @property
    def block(self) -> tuple[tuple[str, str], ...] | None:
        """Returns the layers of `transformer_block`, which replaces the calls of a block's
        operators.

        It is None where one of them is not ours, and where rows that nothing reads are computed.
        """
        if not (self.skip_unread and block_of(self.implementations())):
            return None
        return tuple((family, getattr(self, family)) for family in LAYERS)

    @property
    def refuses_buffer(self) -> str | None:
        """Returns why the variant cannot run a model with a buffer, or None where it can."""
        if self.centred_keys:
            return (
                "has centred_keys: a mean of a sample's keys would change with every point of the "
                "buffer"
            )
        if not is_automatic(self.attention):
            own = catalog().listed("attention", self.attention).own
            if own is not None and "causal" not in own.options:
                return f"has attention {self.attention!r}: rows of a buffer need one that is causal"
        return "packs rows: a model with a buffer does not" if self.pack else None

    @property
    def in_8_bits(self) -> tuple[tuple[Operator, Implementation], ...]:
        """Returns our operators whose products are in 8 bits, with their implementations."""
        return tuple(
            (operator, own)
            for family, name in self.implementations().items()
            if not is_automatic(name)
            for operator in catalog().family(family)
            if (own := catalog().listed(operator.name, name).own) is not None and own.precision
        )

    @property
    def without_8_bits(self) -> "Variant":
        """Returns this variant with our best 16-bit implementations in place of 8-bit ones."""
        families = (operator.family or operator.name for operator, _ in self.in_8_bits)
        return replace(self, **dict.fromkeys(families, OWN))

    @property
    def precision(self) -> str:
        """Returns the number format of our products in 8 bits, or "" without any."""
        return next((own.precision for _, own in self.in_8_bits), "")

    def refuses(
        self, sizes: Mapping[str, int], dtype: str, target: Target, trains: bool = False
    ) -> str | None:
        """Returns why an operator in 8 bits cannot run a model, in a sentence, or None.

        It asks for one row, so that limits of the number of rows remain the operator's.

        Args:
            sizes: the fields of the model's `TNPConfig`.
            dtype: the model's compute_dtype, such as "bfloat16".
            target: the device.
            trains: whether gradients are requested.
        """
        run = {"batch": 1, "n_context": 1, "n_target": 1, "dtype": dtype}
        model = {**sizes, "d_ff_storage": self.storage(sizes["d_ff"])}
        for operator, own in self.in_8_bits:
            wanted = operator.differentiated if trains else ()
            call = Call(operator.within(model, run), target, wanted)
            # The device comes first: on a CPU the dtype is float32 because of the device.
            reason = own.supported(call) or own.refuses(call)
            if reason is not None:
                return (
                    f"variant {self.name!r} cannot run {operator.name} in {own.precision} here: "
                    f"{reason}. Choose variant 'auto', which runs anywhere"
                )
        return None

    @classmethod
    def from_spec(cls, name: str, spec: dict) -> "Variant":
        """Returns the variant `name` from its fields in a file.

        Raises:
            ValueError: `spec` has an unknown key, or a field has a bad value.
        """
        known = [field.name for field in fields(cls) if field.name != "name"]
        for key in spec:
            if key not in known:
                raise ValueError(
                    f"variant {name!r} has an unknown key {key!r}: choose from {', '.join(known)}"
                )
        return cls(name, **spec)

    @classmethod
    def named(cls, name: str, d_ff: int | None = None) -> "Variant":
        """Returns a variant of `variants.toml`, for models of any size.

        Args:
            name: its name in that file.
            d_ff: deprecated. A model pads its hidden layers by its own `d_ff`.

        Raises:
            ValueError: there is no variant of that name.
        """
        if d_ff is not None:
            warnings.warn(
                "Variant.named needs no d_ff: a model pads hidden layers by its own configuration",
                DeprecationWarning,
                stacklevel=2,
            )
        if name not in named_specs():
            raise ValueError(
                f"there is no variant {name!r}: choose from {', '.join(named_specs())}, or make a "
                "Variant of your own"
            )
        return cls.from_spec(name, named_specs()[name])

    def implementations(self) -> dict[str, str]:
        """Returns {family of operators: implementation}."""
        return {family: getattr(self, family) for family in FAMILIES}

    def role(self, checkpoint: bool = False, cuda_graph: bool = False) -> str:
        """Returns a step's role in comparisons, one of `tnp.store.schemas.ROLES`.

        It is "own" if any operator is ours, "baseline" for the specification's step, else "peer".
        """
        for family, name in self.implementations().items():
            if any(catalog().role(op.name, name) == OWN for op in catalog().family(family)):
                return OWN
        plain = replace(self, name="") == Variant("") and not (checkpoint or cuda_graph)
        return "baseline" if plain else "peer"


@cache
def named_specs() -> dict[str, dict]:
    """Returns {name: fields} of all variants that come with the package."""
    found: dict[str, dict] = {}
    for name, spec in tomllib.loads(NAMED.read_text()).items():
        like = spec.pop("like", None)
        found[name] = (found[like] if like else {}) | spec
    return found


def storage_width(d_ff: int) -> int:
    """Returns the best width to store hidden layers of `d_ff`.

    It is the next multiple of 128, or `d_ff` itself if that would pad more than `MOST_PADDING`.
    """
    padded = most_storage(d_ff)
    return padded if padded - d_ff <= MOST_PADDING * d_ff else d_ff


def with_storage(spec: dict, d_ff: int) -> dict:
    """Returns a variant's fields as results record them, with `d_ff_storage` as a number."""
    if spec.get("d_ff_storage") is not True:
        return spec
    return spec | {"d_ff_storage": storage_width(d_ff)}


def most_storage(d_ff: int) -> int:
    """Returns the largest width to store hidden layers of `d_ff`: a wider one only costs time."""
    return -(-d_ff // STORAGE_MULTIPLE) * STORAGE_MULTIPLE


# Fields of a variant that name an implementation.
FAMILIES = tuple(field.name for field in fields(Variant) if field.type is str)[1:]


def not_in_models(family: str, name: str) -> str | None:
    """Returns why no model can use the implementation on any device, or None where one can.

    Raises:
        ValueError: an operator of the family has no implementation of that name.
    """
    for operator in catalog().family(family):
        if not is_automatic(name):
            own = catalog().listed(operator.name, name).own
            if own is not None and own.compile:
                return FOR_BENCHMARKS
    return None
