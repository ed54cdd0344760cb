"""What an operator is, what a way to compute it is, and what both are asked for.

An *operator* says what is computed. An *implementation* is one way to compute it: it is gated,
timed, and chosen by its name or by "auto". Implementations of our own are made of *operations*,
such as "attention.forward", each served by one or more *kernels*.

This module imports neither torch nor triton: the configuration is checked and jobs are planned
with it. Whatever an operator's declaration calls imports torch in its own body.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tnp.util.extras import triton_is_installed

if TYPE_CHECKING:
    from tnp.dispatch.devices import Target

FLOATS = ("bfloat16", "float16", "float32")
ALL_FLOATS = (*FLOATS, "float64")  # what PyTorch's own forms take
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}
OWN = "own"  # the provider of what is ours

Value = bool | int | float | str
Pairs = tuple[tuple[str, Value], ...]
Reason = str | None  # why not; None: it can


@dataclass(frozen=True)
class Problem:
    """What is computed, as far as cost, choice and support depend on it.

    An option is off unless it is listed: `problem["causal"]` is then False, and the JSON does not
    name it. So an operator can gain options, and every stored problem stays what it was.
    """

    op: str
    dtype: str  # of the activations
    sizes: Pairs  # in the operator's order
    options: Pairs = ()  # those that are on, sorted
    known: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    def __getitem__(self, name: str) -> Value:
        for pairs in (self.sizes, self.options):
            for key, value in pairs:
                if key == name:
                    return value
        if name in self.known:
            return False
        raise KeyError(f"{self.op} has no size or option {name!r}: it has {sorted(self.known)}")

    def __str__(self) -> str:
        named = ", ".join(f"{name}={value}" for name, value in (*self.sizes, *self.options))
        return f"{self.op} {self.dtype} {named}"

    @property
    def itemsize(self) -> int:
        """Bytes of an activation."""
        return ITEMSIZE[self.dtype]

    @property
    def json(self) -> str:
        """The key of this problem in rows and tables: names sorted, no blanks."""
        content: dict[str, Any] = {"op": self.op, "dtype": self.dtype, "sizes": dict(self.sizes)}
        if self.options:
            content["options"] = dict(self.options)
        return json.dumps(content, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True)
class Case:
    """A problem and how its values are drawn, on which no choice may depend."""

    problem: Problem
    # What the operator's `draw` reads; with ("forward_only", True) no gate asks for gradients.
    draw: Pairs = ()

    def __getitem__(self, name: str) -> Value:
        return dict(self.draw).get(name, False)

    def __str__(self) -> str:
        drawn = ", ".join(f"{name}={value}" for name, value in self.draw)
        return f"{self.problem} ({drawn})" if drawn else str(self.problem)


@dataclass(frozen=True)
class Call:
    """What a plan is made for."""

    problem: Problem
    target: Target
    wanted: tuple[str, ...] = ()  # inputs whose gradients are asked for
    # Every row of every tensor starts at a multiple of 16 bytes. Not of an expanded gradient, which
    # a backward kernel that reads rows copies first.
    aligned: bool = True
    apart: bool = False  # results share no memory, as PyTorch asks of custom operators

    @property
    def mode(self) -> str:
        """ "training" where a gradient is asked for, else "inference"."""
        return "training" if self.wanted else "inference"


Support = Callable[[Call], Reason]


def anywhere(call: Call) -> Reason:
    """Support for every call."""
    return None


def on_cuda(least: int, below: int = 9999) -> Support:
    """Support for GPUs of compute capability `least` (90 is 9.0) up to, not including, `below`."""

    def supported(call: Call) -> Reason:
        target = call.target
        if target.kind != "cuda":
            return f"it needs a CUDA device, not {target.kind}"
        if least <= target.capability < below:
            return None
        bound = (
            f"{least / 10} or newer" if target.capability < least else f"older than {below / 10}"
        )
        return f"it needs compute capability {bound}, this GPU has {target.capability / 10}"

    return supported


def triton_from(least: int) -> Support:
    """Support for Triton kernels: CUDA from this capability on, and the interpreter."""
    cuda = on_cuda(least)

    def supported(call: Call) -> Reason:
        if not triton_is_installed():
            return "triton is not installed, in which it is written"
        if call.target.kind == "interpreter":
            return None
        if call.target.kind == "cpu":
            return (
                "Triton kernels run on CUDA; on the CPU only in the interpreter, which "
                "TRITON_INTERPRET=1 turns on before triton is imported"
            )
        return cuda(call)

    return supported


@dataclass(frozen=True)
class Kernel:
    """One way to launch an operation. It stands beside its code.

    `prepare(call, config, inputs)` runs once a plan and returns `launch(inputs, scalars)`, which
    only allocates and launches, and returns (outputs, saved). A launch keeps no tensor.
    `empty(wanted, inputs)` returns the same, uninitialized, laid out as where `Call.apart`; a
    compiler sees nothing else. Of a forward operation it is also passed `Operator.of_results`.

    Of a backward operation `inputs` are (gradients, kept, saved): gradients of the outputs, the
    tensors that `Operator.keeps` names, and what the forward kernel saved. There `launch` returns
    the gradients alone, in the order of `Operator.differentiated`, None where not wanted; so does
    `empty`.

    `counts(call, config)` is what a launch's time is made of: 1 for itself, then the blocks and
    tiles of a multiprocessor. A GPU's table says how long each takes (`tnp.tuning.fit_costs`).
    """

    name: str
    empty: Callable[..., Any]
    prepare: Callable[..., Callable[..., Any]]
    supported: Support = anywhere
    configs: Callable[[Call], tuple[Any, ...]] = lambda call: (None,)  # the default first
    options: tuple[str, ...] = ()  # that it takes
    saves: str = ""  # the form of what is saved; a backward kernel names the form that it reads
    moving: tuple[str, ...] = ()  # results that may differ between runs by the order of a sum
    # Where it is None, or returns None for a call, no time is predicted.
    counts: Callable[[Call, Any], tuple[float, ...] | None] | None = None
    compiled_for: tuple[int, ...] = (80, 90, 100)  # capabilities, by the compile gate

    def refuses(self, call: Call) -> Reason:
        """Why it cannot serve the call, or None."""
        for name, value in call.problem.options:
            if name not in self.options:
                return f"it does not take {name}={value}"
        return self.supported(call)


@dataclass(frozen=True)
class Operation:
    """A step that several kernels can serve: "module:NAME" each, the first that can by default."""

    name: str  # "attention.forward": the key of its entries in tuned tables
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class Budget:
    """How far a result may be off, in units of PyTorch's own error against float64 in that dtype.

    An implementation in a narrower format names `emulate`: (case, inputs) → the inputs as that
    format holds them. Its kernel is then compared with float64 of those, and its result with
    float64 of the originals, within `emulated` times the emulation's own error.

    Where it rounds to that format on the way too, it also names `rounded`: (case, inputs, upstream)
    → outputs, and gradients by "d" + input where it gives any, in float64, of the inputs as they
    are, with all its roundings; `upstream` gives the gradient of an output, by its name and a
    tensor like it. What these are off by then counts as PyTorch's error does, and is the
    emulation's own.
    """

    outputs: float = 2.0
    gradients: float = 3.0
    emulate: Callable[[Case, dict], dict] | None = None
    rounded: Callable[[Case, dict, Callable], dict] | None = None
    emulated: float = 1.25


@dataclass(frozen=True)
class Work:
    """The least that must be done: operations by number format, bytes read and written once."""

    flops: Mapping[str, float]
    read: float
    written: float

    @property
    def bytes(self) -> float:
        """Through device memory."""
        return self.read + self.written


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operator, and all that anybody must know about it.

    Either `run`, a function with the reference's arguments that PyTorch differentiates, or
    operations of ours, which `tnp.dispatch` puts behind plans, autograd and torch.compile.
    """

    name: str
    run: Callable[..., Any] | None = None
    forward: Operation | None = None
    backward: Operation | None = None
    supported: Support = anywhere  # asked last: see `limits`
    missing: Callable[[], Reason] = lambda: None  # what it needs that is not installed, a sentence
    dtypes: tuple[str, ...] = FLOATS
    options: tuple[str, ...] = ()  # that it takes
    gradients: tuple[str, ...] | None = None  # that it gives; None: all; (): forward only
    provider: str = OWN  # "torch", or the package that it comes from
    precision: str = ""  # "e4m3", "int8": below the problem's dtype; "auto:e4m3" alone takes it
    selectable: bool = True  # "auto" may take it
    traceable: bool = True  # torch.compile can look inside `run`
    compile: str = ""  # "default", "max-autotune": `run` compiled, for benchmarks alone
    dispatches: tuple[str, ...] = ()  # operators of PyTorch that do the work, "aten::…"
    moving: tuple[str, ...] = ()  # of `run`; of operations the kernels say it
    budget: Budget | None = None  # None: the operator's
    work: Callable[[Case, str], Work] | None = None  # None: the operator's
    # Called as `run` is: what that does once for numbers that stay, and its time leaves out.
    plan: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if (self.run is None) == (self.forward is None):
            raise ValueError(f"implementation {self.name!r} must have either `run` or `forward`")

    @property
    def chosen_from(self) -> bool:
        """Whether plain "auto" may take it: a choice of precision is the user's."""
        return self.selectable and not self.compile and not self.precision

    @property
    def differentiable(self) -> bool:
        """Whether it gives any gradient."""
        return self.gradients != () if self.run else self.backward is not None

    def refuses(self, call: Call) -> Reason:
        """Why it cannot serve the call, or None: its limits first, then what is not installed."""
        return self.limits(call) or self.missing()

    def limits(self, call: Call) -> Reason:
        """Why it could serve the call nowhere: declared limits first, then its own word."""
        problem = call.problem
        if problem.dtype not in self.dtypes:
            return f"it takes {', '.join(self.dtypes)}, not {problem.dtype}"
        if call.wanted and not self.differentiable:
            return "it is forward only"
        for name in call.wanted:
            if self.gradients is not None and name not in self.gradients:
                return f"it gives no gradient of {name}"
        for name, value in problem.options:
            if name not in self.options:
                return f"it does not take {name}={value}"
        return self.supported(call)


@dataclass(frozen=True)
class Operator:
    """What all implementations of an operator have in common.

    `condition` gives the relative error that no rounding can undercut, of a case and its inputs by
    name: one number, or one by result, the gradients called "d" + input.

    `spot` is for problems of which float64 does not fit: (case, inputs, gradients) → {result:
    (index, float64)}. It computes a part of the results from the inputs by name. Where `gradients`
    is None results are outputs; else they are the inputs' gradients, "d" + name, of these gradients
    of the outputs by name. `index` says which part of a whole result the float64 one is: the last
    head is (-1, -1). Options are in `case.problem`, scalars are `numbers`.

    An output that is called as an option is there where that is on; such outputs come last.

    `draw` may give gradients of outputs as well, "d" + output, where a model's have a layout of
    their own.
    """

    name: str
    inputs: tuple[str, ...]  # tensors in the order of a call; "n_keys?" may be None
    outputs: tuple[str, ...]
    sizes: tuple[str, ...]
    implementations: tuple[Implementation, ...]  # PyTorch's plain form first, then boldest last
    describe: Callable[..., dict[str, Any]]  # (*inputs, **options) → sizes, options, dtype
    draw: Callable[[Case, Any], dict[str, Any]]  # (case, random) → tensors by name: see above
    reference: Callable[..., Any]  # (*inputs, *scalars, **options) in any float dtype
    work: Callable[[Case, str], Work]  # (case, "forward" or "backward")
    cases: Callable[[Target], Iterable[Case]]  # of its gate
    family: str = ""  # the key of a variant that names its implementation; "": its own name
    differentiated: tuple[str, ...] = ()
    # Numbers that no choice depends on, scale or eps, and what gates and benchmarks pass.
    scalars: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, type | tuple] = field(default_factory=dict)  # off unless named
    numbered: tuple[str, ...] = ()  # sizes that no tensor shows: calls pass them as options
    shown: tuple[str, ...] = ()  # options that `describe` reads off tensors: no call passes them
    laid_out_by: tuple[str, ...] = ()  # options that decide the layout of what is saved
    keeps: tuple[str, ...] | None = None  # what the backward pass gets; None: the inputs
    budget: Budget = Budget()
    condition: Callable[[Case, dict], Any] | None = None  # see above
    controls: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # must turn it red
    # Likewise by option, for the gates of implementations that take it.
    controls_of: Mapping[str, Mapping[str, Callable[..., Any]]] = field(default_factory=dict)
    # Inputs → those of them that say how many rows there are, with numbers of other rows.
    other_lengths: Callable[[dict], dict[str, Any]] = lambda inputs: {}
    # (case, inputs) → for each number out of range: inputs that have it; inputs that have the
    # nearest in range, {} for those given; and by result, bool, where that must be NaN.
    out_of_range: Callable[[Case, dict], Iterable[tuple[dict, dict, dict]]] = lambda *_: ()
    spot: Callable[[Case, dict, dict | None], dict[str, Any]] | None = None  # see above
    within: Callable[[Mapping, Mapping], Problem | None] = lambda model, run: None
    compiled: Callable[[Target], Iterable[Problem]] | None = None  # None: problems of its cases
    fixed: tuple[str, ...] = ()  # sizes and options that a table's entry must share exactly
    coordinates: Callable[[Problem], tuple[float, ...]] | None = None  # what "nearest" compares
    drawn: Callable[[Any, str], Problem] | None = (
        None  # (random.Random, dtype) → for `tnp.tuning.fit_costs`
    )
    backward_with_forward: bool = False  # the gradient may be made along with the result

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the inputs."""
        return tuple(name.removesuffix("?") for name in self.inputs)

    @property
    def optional(self) -> tuple[str, ...]:
        """Inputs that may be None: that one is given is an option of the problem."""
        return tuple(name[:-1] for name in self.inputs if name.endswith("?"))

    def outputs_of(self, problem: Problem) -> tuple[str, ...]:
        """Names of the outputs that are asked for."""
        return tuple(name for name in self.outputs if name not in self.options or problem[name])

    def of_results(self, options: Mapping[str, Value]) -> dict[str, Value]:
        """Returns the options of a call that `Kernel.empty` needs beside the inputs, by name."""
        named = (*self.numbered, *self.outputs, *self.laid_out_by)
        return {name: value for name, value in options.items() if name in named}

    @property
    def kept(self) -> tuple[str, ...]:
        """Inputs and outputs that the backward pass gets."""
        return self.tensors if self.keeps is None else self.keeps

    def problem(self, dtype: str, /, **values: Value) -> Problem:
        """Of these sizes and options; ValueError naming what does not exist or is not allowed."""
        allowed = dict(self.options) | dict.fromkeys(self.optional, bool)
        known = frozenset((*self.sizes, *allowed))
        for name in values:
            if name not in known:
                raise ValueError(
                    f"{self.name} has no size or option {name!r}: it has {', '.join(sorted(known))}"
                )
        for name in self.sizes:
            if name not in values:
                raise ValueError(f"{self.name} needs size {name!r}")
            size = values[name]
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise ValueError(f"{self.name}: {name} is {size!r}: it must be a whole number")
        options = {}
        for name, kind in allowed.items():
            value = values.get(name, False)
            if isinstance(kind, tuple) and value and value not in kind:
                choices = ", ".join(map(str, kind))
                raise ValueError(f"{self.name}: {name} is {value!r}: choose from {choices}")
            if value:
                options[name] = value
        sizes = tuple((name, values[name]) for name in self.sizes)
        return Problem(self.name, dtype, sizes, tuple(sorted(options.items())), known)

    def case(self, dtype: str, *sizes: int, **named: Value) -> Case:
        """Of sizes in the operator's order. What is named is an option, or how values are drawn."""
        known = (*self.options, *self.optional)
        of_problem = {name: named.pop(name) for name in known if name in named}
        of_problem |= zip(self.sizes, sizes, strict=True)
        return Case(self.problem(dtype, **of_problem), tuple(named.items()))

    def from_json(self, text: str) -> Problem:
        """The problem whose `json` this is; ValueError where it is none of ours."""
        content = json.loads(text)
        try:
            op, dtype = content["op"], content["dtype"]
            values = dict(content["sizes"]) | content.get("options", {})
        except (KeyError, TypeError):
            raise ValueError(f"{text} is no problem of {self.name}") from None
        if op != self.name:
            raise ValueError(f"a problem of {op} is none of {self.name}")
        return self.problem(dtype, **values)

    def distance(self, one: Problem, other: Problem) -> float:
        """Σ |log2 of the ratio| over what decides cost."""
        at = self.coordinates or (lambda problem: tuple(size for _, size in problem.sizes))
        pairs = zip(at(one), at(other), strict=True)
        return sum(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in pairs)

    def controls_for(self, found: Implementation) -> dict[str, Callable[..., Any]]:
        """Broken references that an implementation's gate must find out."""
        taken = (some for option, some in self.controls_of.items() if option in found.options)
        return {name: broken for some in (self.controls, *taken) for name, broken in some.items()}

    def call_options(self, problem: Problem) -> Pairs:
        """What a call of this problem passes as options: those that are on, and sizes."""
        unsaid = (*self.optional, *self.shown)
        on = tuple(pair for pair in problem.options if pair[0] not in unsaid)
        return on + tuple((name, problem[name]) for name in self.numbered)

    @property
    def numbers(self) -> tuple[float, ...]:
        """The scalars that gates and benchmarks pass."""
        return tuple(self.scalars.values())
