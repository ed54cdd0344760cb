"""Defines operators, implementations and kernels, and the calls that they serve.

An *operator* says what is computed. An *implementation* is one way to compute it: it is gated,
timed, and chosen by its name or by "auto". Our own implementations consist of *operations*, such
as "attention.forward", each served by one or more *kernels*.

This module imports neither torch nor triton, because planning jobs must not wait for them. The
functions that a declaration names import torch in their own bodies.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tnp.util.extras import triton_is_installed

if TYPE_CHECKING:
    from tnp.dispatch.devices import Target

FLOATS = ("bfloat16", "float16", "float32")
ALL_FLOATS = (*FLOATS, "float64")  # taken by PyTorch's own forms
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}
PASSES = ("forward", "backward")
OWN = "own"  # the provider of our implementations
EIGHT_BITS = 5  # the specification's phase of every implementation in 8 bits
# Compute capabilities that the compile gate compiles every dtype for: 8.6 has the least shared
# memory, 9.0 has all kernels. The others get bfloat16.
EVERY_DTYPE_ON = (86, 90)

Value = bool | int | float | str
Pairs = tuple[tuple[str, Value], ...]
Reason = str | None  # why something cannot run; None: it can


@dataclass(frozen=True)
class Problem:
    """Describes a computation, as far as cost, choice and support depend on it.

    An option is off unless it is listed: `problem["causal"]` is then False, and the JSON does not
    name it. So an operator can gain options, and every stored problem stays what it was.
    """

    op: str
    dtype: str  # the activations' dtype
    sizes: Pairs  # in the operator's order
    options: Pairs = ()  # the options that are on, sorted
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
        """Returns the bytes of an activation."""
        return ITEMSIZE[self.dtype]

    @property
    def json(self) -> str:
        """Returns the key of this problem in rows and tables: names sorted, no blanks."""
        content: dict[str, Any] = {"op": self.op, "dtype": self.dtype, "sizes": dict(self.sizes)}
        if self.options:
            content["options"] = dict(self.options)
        return json.dumps(content, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True)
class Case:
    """Holds a problem, and how its values are drawn. No choice depends on the values."""

    problem: Problem
    # The operator's `draw` reads it. With ("forward_only", True) no gate asks for gradients.
    draw: Pairs = ()

    def __getitem__(self, name: str) -> Value:
        return dict(self.draw).get(name, False)

    def __str__(self) -> str:
        drawn = ", ".join(f"{name}={value}" for name, value in self.draw)
        return f"{self.problem} ({drawn})" if drawn else str(self.problem)


@dataclass(frozen=True)
class Call:
    """Describes a call: a plan is made for it."""

    problem: Problem
    target: Target
    wanted: tuple[str, ...] = ()  # inputs whose gradients are requested
    # Every row of every tensor starts at a multiple of 16 bytes. An expanded gradient counts as
    # aligned: a backward kernel that reads rows copies it first.
    aligned: bool = True
    apart: bool = False  # results share no memory, as PyTorch asks of custom operators

    @property
    def mode(self) -> str:
        """Returns "training" if a gradient is requested, else "inference"."""
        return "training" if self.wanted else "inference"


Support = Callable[[Call], Reason]


def anywhere(call: Call) -> Reason:
    """Supports every call."""
    return None


def on_cuda(least: int, below: int = 9999) -> Support:
    """Returns a `Support` for GPUs of compute capability from `least` (90 is 9.0) below `below`."""

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
    """Returns a `Support` for Triton kernels: CUDA from `least` on, and the interpreter."""
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


def lacks_shared(call: Call, needed: int) -> Reason:
    """Returns why a GPU is refused whose blocks have fewer than `needed` bytes of shared memory."""
    target = call.target
    if target.kind != "cuda" or target.shared_bytes >= needed:
        return None
    return (
        f"its kernel needs {needed / 1024:.0f} KB of shared memory, and a block of this GPU has "
        f"{target.shared_bytes // 1024} KB"
    )


@dataclass(frozen=True)
class Kernel:
    """Describes one way to launch an operation. It is defined beside the kernel's code.

    `prepare(call, config, inputs)` runs once a plan and returns `launch(inputs, scalars)`, which
    only allocates and launches, and returns (outputs, saved). A launch keeps no tensor.
    `empty(wanted, inputs)` returns the same, uninitialized, in the layout of `Call.apart`; a
    compiler sees nothing else. A forward kernel's `empty` also gets `Operator.of_results`.

    For a backward operation, `inputs` are (gradients, kept, saved): gradients of the outputs, the
    tensors that `Operator.keeps` names, and the tensors that the forward kernel saved. `launch` and
    `empty` then return only gradients, in the order of `Operator.differentiated`, None where not
    requested.

    `counts(call, config)` returns the parts of a launch's time: 1 for the launch, then the blocks
    and tiles of a multiprocessor. A GPU's table says how long each takes (`tnp.tuning.fit_costs`).
    """

    name: str
    empty: Callable[..., Any]
    prepare: Callable[..., Callable[..., Any]]
    supported: Support = anywhere
    configs: Callable[[Call], tuple[Any, ...]] = lambda call: (None,)  # the default first
    options: tuple[str, ...] = ()  # the options that it takes
    saves: str = ""  # the form of the saved tensors; a backward kernel names the form it reads
    nondeterministic: tuple[str, ...] = ()  # results whose sums have no fixed order
    # If it is None, or returns None for a call, no time is predicted.
    counts: Callable[[Call, Any], tuple[float, ...] | None] | None = None
    # compute capabilities that the compile gate compiles it for; 8.6 and 8.9 come with 8.0
    compiled_for: tuple[int, ...] = (80, 90, 100)

    def refuses(self, call: Call) -> Reason:
        """Returns why it cannot serve the call, or None."""
        for name, value in call.problem.options:
            if name not in self.options:
                return f"it does not take {name}={value}"
        return self.supported(call)


@dataclass(frozen=True)
class Operation:
    """Names the kernels for a step, "module:NAME" each. The first that can run is the default."""

    name: str  # "attention.forward": the key of its entries in tuned tables
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class Budget:
    """Bounds a result's error, in units of PyTorch's own error against float64 in that dtype.

    An implementation in a narrower format names `emulate`: (case, inputs) → the inputs as that
    format holds them. Its kernel is compared with float64 of these inputs. Its result is compared
    with float64 of the originals, within `emulated` times the emulation's own error.

    If it also rounds intermediate values to that format, it names `rounded`: (case, inputs,
    upstream) → outputs and gradients ("d" + input) in float64, with all its roundings. `upstream`
    gives the gradient of an output, by its name and a tensor like it, or None. The error of these
    results then serves as the emulation's error. Results that it leaves out are not rounded on the
    way. `differentiates(case)` says whether the gradients are finite in that format. Gates ask for
    no others.
    """

    outputs: float = 2.0
    gradients: float = 3.0
    emulate: Callable[[Case, dict], dict] | None = None
    rounded: Callable[[Case, dict, Callable], dict] | None = None
    emulated: float = 1.25
    differentiates: Callable[[Case], bool] = lambda case: True


@dataclass(frozen=True)
class Work:
    """Gives the least work: operations by number format, bytes read and written once."""

    flops: Mapping[str, float]
    read: float
    written: float

    @property
    def bytes(self) -> float:
        """Returns the bytes through device memory."""
        return self.read + self.written


@dataclass(frozen=True)
class Implementation:
    """Declares one way to compute an operator.

    It has either `run`, a function with the reference's arguments that PyTorch differentiates, or
    operations of ours, which `tnp.dispatch` runs behind plans, autograd and torch.compile.
    """

    name: str
    run: Callable[..., Any] | None = None
    forward: Operation | None = None
    backward: Operation | None = None
    supported: Support = anywhere  # called last: see `limits`
    missing: Callable[[], Reason] = lambda: None  # a sentence that names a missing package
    dtypes: tuple[str, ...] = FLOATS
    options: tuple[str, ...] = ()  # the options that it takes
    gradients: tuple[str, ...] | None = None  # gradients that it gives; None: all; (): forward only
    provider: str = OWN  # "torch", or the package that brings it
    precision: str = ""  # "e4m3", "int8": below the problem's dtype; only "auto:e4m3" takes it
    selectable: bool = True  # "auto" may take it
    traceable: bool = True  # torch.compile can look inside `run`
    compile: str = ""  # "default", "max-autotune": `run` is compiled, only for benchmarks
    dispatches: tuple[str, ...] = ()  # operators of PyTorch that do the work, "aten::…"
    nondeterministic: tuple[str, ...] = ()  # results of `run`; kernels name their own
    budget: Budget | None = None  # None: the operator's
    work: Callable[[Case, str], Work] | None = None  # None: the operator's
    # Takes the same arguments as `run`. Does the one-time work (a plan for fixed lengths) that the
    # benchmark does not time.
    plan: Callable[..., Any] | None = None
    title: str = ""  # its name in figures; "": the words of `tnp.figures.words`, or `name`

    def __post_init__(self) -> None:
        if (self.run is None) == (self.forward is None):
            raise ValueError(f"implementation {self.name!r} must have either `run` or `forward`")

    @property
    def chosen_from(self) -> bool:
        """Returns whether plain "auto" may take it: a lower precision is the user's choice."""
        return self.selectable and not self.compile and not self.precision

    @property
    def differentiable(self) -> bool:
        """Returns whether it gives any gradient."""
        return self.gradients != () if self.run else self.backward is not None

    def refuses(self, call: Call) -> Reason:
        """Returns why it cannot serve the call here, or None."""
        return self.limits(call) or self.missing()

    def limits(self, call: Call) -> Reason:
        """Returns why it cannot serve the call on any device, or None."""
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
    """Declares an operator, with everything that its implementations share.

    `condition(case, inputs)` returns the relative error that no rounding can undercut: one number,
    or one for each result, gradients named "d" + input.

    `partial_reference(case, inputs, gradients)` returns {result: (index, float64)}, a part of the
    results. Gates use it if a float64 reference does not fit in memory. With `gradients` None the
    results are outputs, else the inputs' gradients, named "d" + input. `index` is the part's place
    in the whole result: the last head is (-1, -1). Options are in `case.problem`, scalars are
    `numbers`.

    An output with an option's name exists only if that option is on. These outputs come last.

    `draw` may also return gradients of outputs, "d" + output, if a model's have another layout.
    """

    name: str
    inputs: tuple[str, ...]  # tensors in the order of a call; "n_keys?" may be None
    outputs: tuple[str, ...]
    sizes: tuple[str, ...]
    implementations: tuple[Implementation, ...]  # PyTorch's plain form first, the boldest last
    describe: Callable[..., dict[str, Any]]  # (*inputs, **options) → sizes, options, or ValueError
    draw: Callable[[Case, Any], dict[str, Any]]  # (case, random) → tensors by name: see above
    reference: Callable[..., Any]  # (*inputs, *scalars, **options) in any float dtype
    work: Callable[[Case, str], Work]  # (case, "forward" or "backward")
    cases: Callable[[Target], Iterable[Case]]  # the cases of its gate
    family: str = ""  # the variant's key that chooses its implementation; "": its own name
    differentiated: tuple[str, ...] = ()
    # Numbers that no choice depends on, such as scale or eps, with the values that gates pass.
    scalars: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, type | tuple] = field(default_factory=dict)  # off unless named
    numbered: tuple[str, ...] = ()  # sizes that no tensor shows: calls pass them as options
    read_off: tuple[str, ...] = ()  # options that `describe` reads off tensors; no call passes them
    laid_out_by: tuple[str, ...] = ()  # options that decide the layout of saved tensors
    # inputs and outputs that the backward pass gets; None: the inputs
    keeps: tuple[str, ...] | None = None
    budget: Budget = Budget()
    condition: Callable[[Case, dict], Any] | None = None  # see above
    # Broken references that the gate must reject.
    controls: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    # More broken references by option, for the gates of implementations that take the option.
    controls_of: Mapping[str, Mapping[str, Callable[..., Any]]] = field(default_factory=dict)
    # Takes the inputs, and returns the inputs that hold lengths, with other lengths in them.
    other_lengths: Callable[[dict], dict[str, Any]] = lambda inputs: {}
    # (case, inputs) → three dictionaries for each number out of range: the inputs that hold it; the
    # same inputs with the nearest number in range, or {} for the given inputs; and for each result
    # a bool tensor that is True where the result must be NaN.
    out_of_range: Callable[[Case, dict], Iterable[tuple[dict, dict, dict]]] = lambda *_: ()
    partial_reference: Callable[[Case, dict, dict | None], dict[str, Any]] | None = (
        None  # see above
    )
    within: Callable[[Mapping, Mapping], Problem | None] = lambda model, run: None
    compiled: Callable[[Target], Iterable[Problem]] | None = None  # None: problems of its cases
    # Problems in a dtype by which other libraries compare it, by a name: see `tnp.bench --suite`.
    suite: Callable[[str], Mapping[str, Problem]] = lambda dtype: {}
    # Options that a table's entry must share, and sizes that its costs depend on.
    fixed: tuple[str, ...] = ()
    # (random.Random, dtype) → a problem that `tnp.tuning.fit_costs` times.
    random_problem: Callable[[Any, str], Problem] | None = None
    backward_with_forward: bool = False  # the forward pass may compute the gradient too
    title: str = ""  # its name in figures, as `Implementation.title`
    # The specification's phase that asks for it; None: no phase does.
    phase: int | None = None
    # Backward operations that a phase of their own asks for, with this phase.
    phases: Mapping[Operation, int] = field(default_factory=dict)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Returns the names of the inputs."""
        return tuple(name.removesuffix("?") for name in self.inputs)

    @property
    def optional(self) -> tuple[str, ...]:
        """Returns the inputs that may be None. Whether one is given is an option of the problem."""
        return tuple(name[:-1] for name in self.inputs if name.endswith("?"))

    def phase_of(self, implementation: Implementation | None) -> int | None:
        """Returns the specification's phase of one of its implementations, or None.

        Args:
            implementation: None stands for an implementation of another package.
        """
        if implementation is None or self.phase is None:
            return self.phase
        if implementation.precision:
            return EIGHT_BITS
        return self.phases.get(implementation.backward, self.phase)

    def outputs_of(self, problem: Problem) -> tuple[str, ...]:
        """Returns the names of the requested outputs."""
        return tuple(name for name in self.outputs if name not in self.options or problem[name])

    def of_results(self, options: Mapping[str, Value]) -> dict[str, Value]:
        """Returns the options of a call that `Kernel.empty` needs beside the inputs, by name."""
        named = (*self.numbered, *self.outputs, *self.laid_out_by)
        return {name: value for name, value in options.items() if name in named}

    @property
    def kept(self) -> tuple[str, ...]:
        """Returns the inputs and outputs that the backward pass gets."""
        return self.tensors if self.keeps is None else self.keeps

    def problem(self, dtype: str, /, **values: Value) -> Problem:
        """Returns the problem of these sizes and options.

        Raises:
            ValueError: a name does not exist, or a value is not allowed.
        """
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
        """Returns the case of sizes in the operator's order.

        A named value is an option of the problem, or says how values are drawn.
        """
        known = (*self.options, *self.optional)
        of_problem = {name: named.pop(name) for name in known if name in named}
        of_problem |= zip(self.sizes, sizes, strict=True)
        return Case(self.problem(dtype, **of_problem), tuple(named.items()))

    def from_json(self, text: str) -> Problem:
        """Returns the problem with this `json`; ValueError if it is another operator's."""
        content = json.loads(text)
        try:
            op, dtype = content["op"], content["dtype"]
            values = dict(content["sizes"]) | content.get("options", {})
        except (KeyError, TypeError):
            raise ValueError(f"{text} is no problem of {self.name}") from None
        if op != self.name:
            raise ValueError(f"a problem of {op} is none of {self.name}")
        return self.problem(dtype, **values)

    def controls_for(self, found: Implementation) -> dict[str, Callable[..., Any]]:
        """Returns broken references, which an implementation's gate must reject."""
        taken = (some for option, some in self.controls_of.items() if option in found.options)
        return {name: broken for some in (self.controls, *taken) for name, broken in some.items()}

    def call_options(self, problem: Problem) -> Pairs:
        """Returns the options that a call of this problem passes, `numbered` sizes among them."""
        left_out = (*self.optional, *self.read_off)
        on = tuple(pair for pair in problem.options if pair[0] not in left_out)
        return on + tuple((name, problem[name]) for name in self.numbered)

    @property
    def numbers(self) -> tuple[float, ...]:
        """Returns the scalars that gates and benchmarks pass."""
        return tuple(self.scalars.values())
