"""Runs a transformer block as a list of launches: the kernels of its layers, one after another.

`Layers` chooses implementations and kernels once a plan. Each layer prepares its launch at its
first run, from the tensors that are there. Later calls only launch: no key, no autograd function
and no view of autograd stands between two layers. The backward pass runs the layers in reverse, and
stops after the last layer that a wanted gradient needs.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import index

import torch

from tnp.dispatch import devices, plans
from tnp.dispatch.selection import aligned, choose_implementation, choose_kernel
from tnp.dispatch.spec import Call, Kernel, Operator, Problem, Reason
from tnp.dispatch.tuned_tables import Choice
from tnp.ops.mlp import composed_8bit
from tnp.ops.projection.products import are_halves
from tnp.ops.transformer_block import LAYERS, OPERATOR, WEIGHTS, layers

OPTIONS = ("update", "n_keys", "centred", *LAYERS)


class Layer:
    """Runs one operator inside a block. Its launches are prepared at its first run.

    Args:
        operator, name, problem: as `layers` yields them.
        call: the block's.
        wanted: inputs of the layer whose gradients the block needs.
        choices: takes the kernels that are chosen, with their configurations, by operation.
    """

    def __init__(
        self,
        operator: Operator,
        name: str,
        problem: Problem,
        call: Call,
        wanted: tuple[str, ...],
        choices: dict[str, dict],
    ) -> None:
        self.operator, self.wanted = operator, wanted
        # `apart` stays False: tensors inside the block may share memory, its results may not. They
        # are aligned, because they are new; norms, which read h, take any.
        self.call = Call(problem, call.target, wanted)
        self.chosen, self.found = choose_implementation(operator, name, self.call)
        self.kernel, picked = choose_kernel(self.found.forward, operator, self.call)
        self.config = picked.config
        self.choices = choices
        self.choices[self.found.forward.name] = picked.describe()
        self.run: Callable | None = None

    def forward(self, inputs: tuple, scalars: tuple = ()) -> tuple[tuple, tuple]:
        """Returns the outputs and the tensors saved for the backward pass."""
        if self.run is None:
            self.run = plans.prepared(self.kernel, self.call, self.config, inputs)
        return self.run(inputs, scalars)

    def backward(
        self, gradients: tuple, kept: tuple, saved: tuple = (), scalars: tuple = ()
    ) -> tuple:
        """Returns the gradients in the order of `differentiated`, None where not wanted."""
        inputs = gradients, kept, saved
        if self.run is None:
            what = replace(self.call, aligned=aligned(kept, gradients))
            kernel, picked = self.backward_kernel(what)
            self.choices[self.found.backward.name] = picked.describe()
            self.run = plans.prepared(kernel, what, picked.config, inputs)
        return self.run(inputs, scalars)

    def backward_kernel(self, what: Call) -> tuple[Kernel, Choice]:
        """Returns the kernel that reads what the forward kernel saves, and its configuration."""
        return choose_kernel(self.found.backward, self.operator, what, self.kernel.saves)

    def empty(self, inputs: tuple, scalars: tuple = ()) -> tuple[tuple, tuple]:
        named = self.operator.of_results(dict(self.operator.call_options(self.call.problem)))
        return self.kernel.empty(self.wanted, inputs, **named)


class NormAndMLP:
    """Runs the second norm and the MLP. On Hopper, a norm before an MLP in 8 bits writes 8 bits.

    Args:
        norm, mlp: the two layers.
    """

    def __init__(self, norm: Layer, mlp: Layer) -> None:
        self.norm, self.mlp = norm, mlp
        self.together = mlp.kernel is composed_8bit.FORWARD_SLOPE
        if self.together:  # rows record the kernel that runs
            norm.choices[norm.found.forward.name] = {"choice": "norm_8bit", "source": "mlp"}
        self.run: Callable | None = None

    def forward(self, inputs: tuple, scalars: tuple) -> tuple[tuple, tuple]:
        """Returns the sum and y of (x, update, weight of the norm, up, down), and what to save."""
        if self.together:
            if self.run is None:
                self.run = composed_8bit.prepare_normed(self.mlp.call, inputs)
            return self.run(inputs, scalars)
        *normed, up, down = inputs
        (total, x), _ = self.norm.forward(tuple(normed), scalars)
        (y,), saved = self.mlp.forward((x, up, down))
        return (total, y), (x, *saved)

    def empty(self, inputs: tuple, scalars: tuple) -> tuple[tuple, tuple]:
        *normed, up, down = inputs
        (total, x), _ = self.norm.empty(tuple(normed), scalars)
        (y,), saved = self.mlp.empty((x, up, down))
        return (total, y), saved if self.together else (x, *saved)

    def split(self, total: torch.Tensor, saved: Sequence[torch.Tensor]) -> tuple:
        """Returns the MLP's x and what it saved. In 8 bits the sum stands for x: both are alike."""
        return (total, saved) if self.together else (saved[0], saved[1:])


class Keys:
    """Saves keys and values for the backward pass, as one tensor if they are halves of rows.

    Tensors that leave a custom operator must share no memory.

    Args:
        call: the projection's.
    """

    def __init__(self, call: Call) -> None:
        p = call.problem
        batch, d_model, n_heads, n_k = (p[name] for name in ("batch", "d_model", "n_heads", "n_k"))
        head_dim, self.d_model = d_model // n_heads, d_model
        self.together = are_halves(call)
        self.both = (batch, n_k, 2 * d_model), (n_k * 2 * d_model, 2 * d_model, 1)
        self.half = (
            (batch, n_heads, n_k, head_dim), (n_k * 2 * d_model, head_dim, 2 * d_model, 1)
        )  # fmt: skip

    def forward(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns what to save for k and v."""
        return (k.as_strided(*self.both),) if self.together else (k, v)

    def empty(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns what `forward` does, uninitialized: `Kernel.empty` lays k and v out apart."""
        return (k.new_empty(self.both[0]),) if self.together else (k, v)

    def split(self, saved: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Returns the saved tensors with separate k and v after x_1 and q. It undoes `forward`."""
        if not self.together:
            return saved
        x_1, q, both, *others = saved
        at = both.storage_offset()  # hooks may hand back a part of other memory
        k, v = both.as_strided(*self.half, at), both.as_strided(*self.half, at + self.d_model)
        return x_1, q, k, v, *others


class Layers:
    """Holds the six layers of a block. Each computes the gradients that `call.wanted` needs."""

    def __init__(self, call: Call) -> None:
        self.choices: dict[str, dict] = {}
        wanted = frozenset(call.wanted)
        norm_1, project, attend, output, norm_2, mlp = layers(call.problem)

        def named(**given: object) -> tuple[str, ...]:
            return tuple(name for name, one in given.items() if one)

        streams = named(x="h" in wanted, update="update" in wanted)
        of_norm_1 = streams + named(weight="norm_attention" in wanted)
        self.norm_1 = Layer(*norm_1, call, of_norm_1, self.choices)
        of_qkv = named(x=of_norm_1, weight="qkv" in wanted)
        self.project = Layer(*project, call, of_qkv, self.choices)
        of_heads = ("q", "k", "v") if of_qkv else ()
        self.attend = Layer(*attend, call, of_heads, self.choices)
        of_output = named(x=of_heads, weight="output" in wanted)
        self.output = Layer(*output, call, of_output, self.choices)
        of_norm_2 = named(x=streams, update=of_output, weight="norm_mlp" in wanted)
        self.norm_2 = Layer(*norm_2, call, of_norm_2, self.choices)
        of_mlp = named(x=of_norm_2, up="up" in wanted, down="down" in wanted)
        self.mlp = Layer(*mlp, call, of_mlp, self.choices)
        p = call.problem
        self.has_update, self.centred = bool(p["update"]), bool(p["centred"])
        batch, rows, d_model, _, n_heads, n_q, _ = (size for _, size in p.sizes)
        self.first, self.n_q = rows - n_q, n_q
        head_dim = d_model // n_heads
        # o as rows [B, n_q, d_model], and rows as heads [B, H, n_q, D].
        self.rows = (batch, n_q, d_model), (n_q * d_model, d_model, 1)
        self.heads = (batch, n_heads, n_q, head_dim), (n_q * d_model, head_dim, d_model, 1)
        self.scale = (head_dim**-0.5,)
        self.keys = Keys(self.project.call)
        self.second = NormAndMLP(self.norm_2, self.mlp)
        self.saves = bool(wanted)

    def each(self, way: str) -> list[Callable]:
        """Returns the method of this name of each layer, in the order of a forward pass."""
        layers = self.norm_1, self.project, self.attend, self.output, self.norm_2, self.mlp
        return [getattr(layer, way) for layer in layers]


def _launch(of: Layers, way: str) -> Callable:
    """Returns the launch of a forward pass. `way` is the method of the layers that it calls."""
    norm_1, project, attend, output, *_ = of.each(way)
    second = getattr(of.second, way)
    has_update, centred, first, n_q = of.has_update, of.centred, of.first, of.n_q
    (rows, strides), scale, saves = of.rows, of.scale, of.saves
    joined = getattr(of.keys, way)

    def launch(inputs: tuple, scalars: tuple) -> tuple[tuple, tuple]:
        h, update, norm_attention, qkv, w_output, norm_mlp, up, down, n_keys = inputs
        if has_update:
            (total, x_1), _ = norm_1((h, update, norm_attention), scalars)
        else:
            total, ((x_1,), _) = h, norm_1((h, norm_attention), scalars)
        (q, k, v), _ = project((x_1, qkv, n_keys if centred else None))
        (o,), of_attention = attend((q, k, v, n_keys, None, None), scale)
        (u,), _ = output((o.as_strided(rows, strides), w_output))
        queries = total.narrow(1, first, n_q) if first else total
        results, of_second = second((queries, u, norm_mlp, up, down), scalars)
        if not saves:
            return results, ()
        streams = (total, x_1) if has_update else (x_1,)
        return results, (*streams, q, *joined(k, v), o, *of_attention, *of_second)

    launch.choices = of.choices
    return launch


def empty(wanted: tuple[str, ...], inputs: tuple, **options) -> tuple[tuple, tuple]:
    """Returns uninitialized outputs and saved tensors, in the layout of `Call.apart`."""
    h, update, *_, n_keys = inputs
    values = OPERATOR.describe(*inputs, **options)
    sizes = {name: index(values[name]) for name in OPERATOR.sizes}
    given = options | {"update": update is not None, "n_keys": n_keys is not None}
    problem = OPERATOR.problem(str(h.dtype).removeprefix("torch."), **given | sizes)
    call = Call(problem, devices.of_device(h.device), wanted, apart=True)
    return _launch(Layers(call), "empty")(inputs, ())


def prepare(call: Call, config: None, inputs: tuple) -> Callable:
    return _launch(Layers(call), "forward")


def empty_backward(wanted: tuple[str, ...], inputs: tuple) -> tuple:
    """Returns uninitialized gradients. Those of h and of an update are one tensor."""
    _, (h, *weights, _n_keys, _sum), _ = inputs
    dh = h.new_empty(h.shape)
    streams = [dh if name in wanted else None for name in ("h", "update")]
    pairs = zip(WEIGHTS, weights, strict=True)
    return *streams, *(x.new_empty(x.shape) if name in wanted else None for name, x in pairs)


def prepare_backward(call: Call, config: None, inputs: tuple) -> Callable:
    of = Layers(call)
    norm_1, project, attend, output, norm_2, mlp = of.each("backward")
    has_update, first, n_q = of.has_update, of.first, of.n_q
    (rows, strides), (heads, steps), scale, keys = of.rows, of.heads, of.scale, of.keys
    split = of.second.split
    reaches = [bool(layer.wanted) for layer in (of.norm_2, of.output, of.project, of.norm_1)]
    to_norm_2, to_output, to_project, to_norm_1 = reaches
    h_wanted = "h" in call.wanted
    streams = h_wanted or "update" in call.wanted

    def launch(inputs: tuple, scalars: tuple) -> tuple:
        (dsum, dy), kept, saved = inputs
        h, norm_attention, qkv, w_output, norm_mlp, up, down, n_keys, sum_ = kept
        total = saved[0] if has_update else None
        x_1, q, k, v, o, lse, *of_second = keys.split(saved[1:] if has_update else saved)
        x_2, of_mlp = split(sum_, of_second)
        if isinstance(saved, list):  # tensors of a layer are freed after it
            saved.clear()
        dnorm_1 = dqkv = doutput = dnorm_2 = dh = dupdate = dqueries = None
        if dy is None:
            dy = torch.zeros_like(sum_)
        dx, dup, ddown = mlp((dy,), (x_2, up, down), tuple(of_mlp))
        del x_2, of_mlp, of_second
        if to_norm_2:
            dqueries, du, dnorm_2 = norm_2((dsum, dx), (sum_, norm_mlp), (), scalars)
        if to_output:
            do, doutput = output((du,), (o.as_strided(rows, strides), w_output))
        if to_project:
            of_heads = q, k, v, n_keys, None, None, o
            del q, k, v, o
            dheads = attend((do.as_strided(heads, steps),), of_heads, (lse,), scale)
            del do, of_heads
        if first and streams:
            dtotal = h.new_zeros(h.shape)
            dtotal.narrow(1, first, n_q).copy_(dqueries)
        else:
            dtotal = dqueries
        if to_project:
            dx, dqkv = project(dheads, (x_1, qkv))
            del dheads, x_1
        if to_norm_1:
            if has_update:
                dh, dupdate, dnorm_1 = norm_1((dtotal, dx), (total, norm_attention), (), scalars)
            else:
                dh, dnorm_1 = norm_1((dx,), (h, norm_attention), (), scalars)
                dh = dh + dtotal if h_wanted else None
        return dh, dupdate, dnorm_1, dqkv, doutput, dnorm_2, dup, ddown

    launch.choices = of.choices
    return launch


def deterministic(call: Call) -> Reason:
    """Returns None if every gradient is equal in every run, else the reason."""
    layer = Layers(call).attend
    if layer.wanted and layer.backward_kernel(layer.call)[0].nondeterministic:
        return "the backward pass of attention sums dq in an order that differs between runs"
    return None


def _nondeterministic(call: Call) -> Reason:
    if deterministic(call) is None:
        return "all gradients are deterministic: kernel 'composed' serves"
    return None


FORWARD = Kernel("composed", empty, prepare, options=OPTIONS)
DETERMINISTIC = Kernel("composed", empty_backward, prepare_backward, deterministic, options=OPTIONS)
NONDETERMINISTIC = Kernel(
    "composed_nondeterministic", empty_backward, prepare_backward, _nondeterministic,
    options=OPTIONS,
    nondeterministic=("dh", "dupdate", "dnorm_attention", "dqkv"),
)  # fmt: skip
