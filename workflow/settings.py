"""Says what config.yaml may contain: the types of its values, and the sections all studies share.

A section of studies is declared beside its kind of study, in `workflow/studies`. Jobs get the
values as they were written: a model here checks them and does not convert them.
"""

import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WrapValidator, create_model

from tnp.bench.policy import LATENCY
from tnp.model.variants import FAMILIES
from workflow.faults import listed, shown

MAX_COUNT = 2**31 - 1  # columns of the store are int32
ABSENT: Any = None  # the default of a key that may be left out, and may not be empty


class Section(BaseModel):
    """Holds keys with values. Refuses an unknown key and a value of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)

    def given(self) -> dict[str, Any]:
        """Returns the values of the keys that were written."""
        return {name: value for name, value in self if name in self.model_fields_set}


def kept(section: Any) -> Any:
    """Returns a type whose values are checked as `section`, and stay dictionaries as written."""
    return Annotated[section, WrapValidator(lambda value, check: (check(value), value)[1])]


def checked(check: Callable[[Any], object], of: Any = Any) -> Any:
    """Returns type `of` with one more check: `check(value)` returns what is wrong, if anything."""

    def validated(value: Any) -> Any:
        wrong = check(value)
        if wrong:
            raise ValueError(wrong)
        return value

    return Annotated[of, AfterValidator(validated)]


def one_of(*known: object) -> Any:
    """Returns a type that has exactly these values."""
    wanted = f"must be one of {listed(map(shown, known))}"
    same = [(type(value), value) for value in known]
    return checked(lambda value: (type(value), value) not in same and wanted)


def like(pattern: str, wanted: str) -> Any:
    """Returns the type of text that matches `pattern` as a whole; `wanted` says that in words."""
    return checked(lambda text: not re.fullmatch(pattern, text) and f"must be {wanted}", str)


def unique(item: Any, least: int = 0) -> Any:
    """Returns the type of a list of at least `least` items, none of which stands in it twice."""

    def twice(values: list) -> str | None:
        found = [value for value in values if values.count(value) > 1]
        return f"{shown(found[0])} stands in it twice" if found else None

    return checked(twice, Annotated[list[item], Field(min_length=least)])


def some(value: Any) -> Any:
    """Returns the type of values by name, at least one."""
    return Annotated[dict[Name, value], Field(min_length=1)]


def _free(value: object) -> str | None:
    if not isinstance(value, int | str | bool):
        return "must be a whole number or text or true or false"
    if isinstance(value, int) and not isinstance(value, bool) and not 1 <= value <= MAX_COUNT:
        return f"must be at {'least 1' if value < 1 else f'most {MAX_COUNT}'}"
    return None


# Three names and some marks make a file's name, and a file system allows 255 characters.
Name = like(
    r"(?=.{,48}$)[a-z][a-z0-9]*(_[a-z0-9]+)*",
    "a name of at most 48 small letters, digits and single underscores",
)
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Size = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Replicates = Annotated[int, Field(ge=1, le=1000)]  # each is a job to plan
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)]
Names, SomeNames = unique(str), unique(str, 1)
Switch = unique(bool, 1)
Devices = unique(one_of("cuda", "cpu"), 1)
Range = checked(lambda ends: len(ends) != 2 and "must be the smallest and the largest", list[Size])
# Holds sizes and options. The operators check them further.
Free = dict[str, checked(_free)]


class Model(Section):
    d_model: Size
    n_layers: Size
    n_heads: Size
    d_ff: Size
    n_components: Size
    heads_gain: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = ABSENT
    buffer: Size = ABSENT  # points behind a context


class Vary(Section):
    """Holds smallest and largest sizes. Each batch or sample draws its own sizes between them.

    The sizes of the shape itself are the means of the draws.
    """

    each: one_of("batch", "sample") = ABSENT
    n_context: Range
    n_target: Range
    together: Size = ABSENT
    log: bool = ABSENT


class Shape(Section):
    batch: Size
    n_context: Size
    n_target: Size
    vary: Vary = ABSENT


class Run(Section):
    """Holds the sizes of a batch that a language model is run on."""

    batch: Size
    n_tokens: Size
    n_cached: Size = ABSENT  # keys of a sequence at most, with those of n_tokens
    page: Size = ABSENT  # tokens of a page of a cache
    draw: dict[Name, Any] = ABSENT  # as an operator's `draw` takes it


class Dtypes(Section):
    cuda: one_of("bfloat16", "float16", "float32")
    cpu: one_of("bfloat16", "float32")


class Latency(Section):
    """Holds the numbers of launches for an entry of `ops` that asks for latency."""

    warmup_calls: Size
    launches: Annotated[int, Field(ge=3, le=1_000_000)]
    flushed_caches: Annotated[int, Field(ge=1, le=1000)]


_POLICY = {
    "warmup_s": Annotated[float, Field(ge=0, le=1_000_000, allow_inf_nan=False)],
    "half_width": Share,
    "max_sampling_s": Seconds,
    "min_samples": Size,
    "long_step_s": Seconds,
    "long_samples": Size,
    "timeout_s": Seconds,
}
Timing = create_model(
    "Timing", __base__=Section, **{name: (of, ...) for name, of in _POLICY.items()}, latency=Latency
)
Briefly = create_model(
    "Briefly", __base__=Section, **{name: (of, ABSENT) for name, of in _POLICY.items()}
)


def _own_timing(value: object, check: Callable[[object], object]) -> object:
    if isinstance(value, str) and value != LATENCY:
        raise ValueError(f"must be one of {LATENCY!r}")
    if value != LATENCY:
        check(value)
    return value


# "latency", or values that replace values of section `timing`.
OwnTiming = Annotated[Briefly, WrapValidator(_own_timing)]

VariantSpec = create_model(
    "VariantSpec",
    __base__=Section,
    **dict.fromkeys(FAMILIES, (str, ABSENT)) | {"attention": (str, ...)},
    skip_unread=(bool, ABSENT),
    centred_keys=(bool, ABSENT),
    pack=(bool, ABSENT),
    d_ff_storage=(
        Annotated[Size, WrapValidator(lambda value, check: value is True or check(value))],
        ABSENT,
    ),
    compile=(one_of(True, False, "max-autotune"), ABSENT),
    recompute_above=(Size, ABSENT),
)


class Study(Section):
    """Says on which devices a study runs, how early, and how often."""

    devices: Devices = ["cuda"]
    priority: Size
    replicates: Replicates = 1


class Shared(Section):
    """Holds the sections that belong to no study."""

    device: like(
        "auto|cpu|cuda|nvidia-[a-z0-9-]+",
        "auto, cpu, cuda, or the slug of a GPU that the jobs will find (clusters)",
    )
    gpus: Annotated[int, Field(ge=1, le=64)] = 1  # of this host
    model: kept(Model)
    compute_dtype: kept(Dtypes)
    shapes: some(kept(Shape))
    models: dict[Name, Free] = {}  # language models
    runs: dict[Name, kept(Run)] = {}
    variants: some(kept(VariantSpec)) = {}
    timing: kept(Timing)
    gates: Names
