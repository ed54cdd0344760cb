"""What an operator benchmark runs: inputs, launches, operations, bytes and the check afterwards.

To add an operator, write a function of (parameters, pass_, device) and enter it in `WORKLOADS`.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F

from tnp import plans
from tnp.bench.roofline import (
    add_rms_norm_bytes,
    attention_bytes,
    attention_flops,
    heads_bytes,
    heads_flops,
    mlp_bytes,
    mlp_flops,
    nll_bytes,
)
from tnp.catalog import catalog
from tnp.ops.attention import OPERATOR as ATTENTION
from tnp.ops.attention import attention

MATMUL_SIZE = 8192
COPY_BYTES = 2**30
NORM_EPS = 1e-6
N_OUTPUTS = 3  # of a mixture component: logit of its weight, mean, log sigma of one dimension
SIGMA_MIN = 0.01
# Elements of a float64 score block in the reference: 1 GiB.
REFERENCE_BLOCK = 2**27

Output = torch.Tensor | tuple[torch.Tensor, ...]
Inputs = list[torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """One pass of one operator, the same for all its implementations.

    `calls(implementation)` launch it on different inputs, together more than the L2 cache holds;
    each returns its output. `check(output)` compares the output of the first: pairs (measured,
    reference). `launch_config(implementation)` is what a kernel of our own was launched with.
    """

    calls: Callable[[str], list[Callable[[], Output]]]
    flops: float | None
    bytes: float
    check: Callable[[Output], list[tuple[torch.Tensor, torch.Tensor]]]
    launch_config: Callable[[str], str | None] = lambda implementation: None


def input_sets(bytes_touched: float, device: torch.device) -> int:
    """How many sets of inputs in rotation exceed twice the L2 cache; 1 on the CPU."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, math.ceil(2 * cache / bytes_touched))


def attention_workload(parameters: dict, pass_: str, device: torch.device) -> Workload:
    """Attention on normal q, k, v: views of one projection [B, L, 3, H, D], as in the model.

    The backward's output gradient has the layout of the model's, [B, n_q, H, D] transposed.
    """
    names = ("batch", "n_heads", "n_q", "n_k", "head_dim")
    batch, n_heads, n_q, n_k, head_dim = size = [parameters[name] for name in names]
    dtype = getattr(torch, parameters["dtype"])
    generator = torch.Generator(device).manual_seed(parameters["replicate"])
    n_bytes = attention_bytes(*size, dtype.itemsize, pass_)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    def qkv() -> list[torch.Tensor]:
        projection = normal(batch, max(n_q, n_k), 3, n_heads, head_dim)
        q, k, v = projection.permute(2, 0, 3, 1, 4)
        return [q[:, :, :n_q], k[:, :, :n_k], v[:, :, :n_k]]

    inputs = [qkv() for _ in range(input_sets(n_bytes, device))]
    gradients = []
    if pass_ == "backward":
        inputs = [[x.requires_grad_() for x in qkv] for qkv in inputs]
        gradients = [normal(batch, n_q, n_heads, head_dim).transpose(1, 2) for _ in inputs]

    def calls(implementation: str) -> list[Callable[[], Output]]:
        forward = [partial(attention, *qkv, implementation=implementation) for qkv in inputs]
        if pass_ == "forward":
            return forward
        return [
            partial(torch.autograd.grad, o(), qkv, do, retain_graph=True)
            for o, qkv, do in zip(forward, inputs, gradients, strict=True)
        ]

    @cache
    def reference() -> tuple[torch.Tensor, ...]:
        return _attention_head_reference(*inputs[0], *gradients[:1])

    def check(output: Output) -> list[tuple[torch.Tensor, torch.Tensor]]:
        measured = [output] if pass_ == "forward" else output
        return [(x[-1, -1], y) for x, y in zip(measured, reference(), strict=True)]

    def launch_config(implementation: str) -> str | None:
        q, k, _ = inputs[0]
        return describe_launch(q, k, pass_, implementation)

    flops = float(attention_flops(*size, pass_))
    return Workload(calls, flops, n_bytes, check, launch_config)


def describe_launch(
    q: torch.Tensor, k: torch.Tensor, pass_: str, implementation: str
) -> str | None:
    """What runs in a "forward" or "backward" pass of attention, kernel and configuration as JSON.

    None for what is not ours.
    """
    found = catalog().load("attention", implementation)
    if found.run is not None:
        return None
    operation = found.forward if pass_ == "forward" else found.backward
    what = plans.describe(ATTENTION, (q, k, k, None), wanted=ATTENTION.differentiated)
    chosen = plans.choose_kernel(operation, ATTENTION, what)[1].describe()
    kernel, config = chosen.pop("choice"), chosen.pop("config")
    return json.dumps({"kernel": kernel} | chosen | config)


def _attention_head_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """o, or with `do` dq, dk, dv, of the last head of the last batch, in float64.

    Plain softmax attention over blocks of queries, so that 200,000 keys fit; the last head is
    where a wrong offset shows.
    """
    q, k, v = (x.detach()[-1, -1].double() for x in (q, k, v))
    scale = q.shape[-1] ** -0.5
    o, dq = torch.empty_like(q), torch.empty_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for rows in torch.arange(len(q), device=q.device).split(max(1, REFERENCE_BLOCK // len(k))):
        p = torch.softmax(q[rows] @ k.T * scale, dim=-1)
        o[rows] = p @ v
        if do is not None:
            do_rows = do[-1, -1][rows].double()
            delta = (do_rows * o[rows]).sum(-1, keepdim=True)
            ds = p * (do_rows @ v.T - delta) * scale
            dq[rows] = ds @ k
            dk += ds.T @ q[rows]
            dv += p.T @ do_rows
    return (o,) if do is None else (dq, dk, dv)


class Normal:
    """Normal numbers on a device, a function of the replicate."""

    def __init__(self, parameters: dict, device: torch.device) -> None:
        self.dtype = getattr(torch, parameters["dtype"])
        self.device = device
        self.generator = torch.Generator(device).manual_seed(parameters["replicate"])

    def activations(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        options = {"dtype": dtype or self.dtype, "device": self.device}
        return torch.randn(shape, generator=self.generator, **options)

    def weight(self, *shape: int, dim: int, storage: int) -> torch.Tensor:
        """float32, scaled by its fan-in (the last dimension), dimension `dim` padded with zeros."""
        weight = self.activations(*shape, dtype=torch.float32) / math.sqrt(shape[-1])
        padding = list(shape)
        padding[dim] = storage - shape[dim]
        return torch.cat([weight, weight.new_zeros(padding)], dim)


@dataclass(frozen=True)
class Operator:
    """What the benchmarks of an operator on rows differ in.

    `draw` gives a set of inputs; the first `n_differentiated` get gradients, of outputs of these
    `output_shapes`. `compute(*inputs, implementation=…)` is the public function, `reference` the
    same formula in whatever dtype it is given.
    """

    draw: Callable[[], Inputs]
    n_differentiated: int
    output_shapes: list[tuple[int, ...]]
    compute: Callable[..., Output]
    reference: Callable[..., Output]
    flops: float | None
    bytes: float
    forward_in_backward: bool = False


def _workload(operator: Operator, normal: Normal, pass_: str) -> Workload:
    """Forward; or backward of the same, with normal output gradients (of a scalar: 1)."""
    # Forward too: a model that trains saves what its backward pass needs.
    differentiated = slice(operator.n_differentiated)
    inputs = [operator.draw() for _ in range(input_sets(operator.bytes, normal.device))]
    for one_set in inputs:
        for x in one_set[differentiated]:
            x.requires_grad_()
    gradients = [
        [
            normal.activations(*shape) if shape else torch.ones((), device=normal.device)
            for shape in operator.output_shapes
        ]
        for _ in inputs
    ]

    def backward(outputs: Output, one_set: Inputs, of: Inputs) -> tuple[torch.Tensor, ...]:
        outputs = _as_tuple(outputs)
        grads = [g.to(o.dtype) for g, o in zip(of, outputs, strict=True)]
        return torch.autograd.grad(outputs, one_set[differentiated], grads, retain_graph=True)

    def calls(implementation: str) -> list[Callable[[], Output]]:
        compute = _computed_by(operator.compute, implementation)
        if pass_ == "forward":
            return [partial(compute, *one_set) for one_set in inputs]
        if operator.forward_in_backward:
            return [
                partial(lambda one_set, of: backward(compute(*one_set), one_set, of), one_set, of)
                for one_set, of in zip(inputs, gradients, strict=True)
            ]
        return [
            partial(backward, compute(*one_set), one_set, of)
            for one_set, of in zip(inputs, gradients, strict=True)
        ]

    @cache
    def reference() -> tuple[torch.Tensor, ...]:
        exact = [x.detach().double() for x in inputs[0]]
        if pass_ == "forward":
            return _as_tuple(operator.reference(*exact))
        for x in exact[differentiated]:
            x.requires_grad_()
        return backward(operator.reference(*exact), exact, gradients[0])

    def check(output: Output) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(_as_tuple(output), reference(), strict=True))

    return Workload(calls, operator.flops, operator.bytes, check)


def _as_tuple(output: Output) -> tuple[torch.Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


def _computed_by(compute: Callable[..., Output], implementation: str) -> Callable[..., Output]:
    """`compute` with that implementation; "compiled" is `torch` under `torch.compile`."""
    if implementation != "compiled":
        return partial(compute, implementation=implementation)
    # The backward is timed many times after one forward, whose buffers it must leave alone.
    torch._functorch.config.donated_buffer = False

    def plain(*inputs: torch.Tensor) -> Output:
        return compute(*inputs, implementation="torch")

    return torch.compile(plain, fullgraph=True, dynamic=False)


def rms_norm_workload(parameters: dict, pass_: str, device: torch.device) -> Workload:
    """`add_rms_norm`: the residual stream's sum and its norm, as between two layers of a block."""
    from tnp.ops.rms_norm import add_rms_norm

    batch, n_rows, d_model = (parameters[name] for name in ("batch", "n_q", "d_model"))
    normal = Normal(parameters, device)
    shape = (batch, n_rows, d_model)

    def reference(x, update, weight):
        total = x + update
        return total, F.rms_norm(total, weight.shape, weight, NORM_EPS)

    operator = Operator(
        lambda: [
            normal.activations(*shape),
            normal.activations(*shape),
            1 + 0.1 * normal.activations(d_model, dtype=torch.float32),
        ],
        3,
        [shape, shape],
        add_rms_norm,
        reference,
        None,
        add_rms_norm_bytes(batch * n_rows, d_model, normal.dtype.itemsize),
    )
    return _workload(operator, normal, pass_)


def mlp_workload(parameters: dict, pass_: str, device: torch.device) -> Workload:
    """silu(x upᵀ) downᵀ of every row, the hidden width zero-padded to `d_ff_storage`."""
    from tnp.ops.mlp import mlp

    names = ("batch", "n_q", "d_model", "d_ff", "d_ff_storage")
    batch, n_rows, d_model, d_ff, storage = (parameters[name] for name in names)
    normal = Normal(parameters, device)
    shape = (batch, n_rows, d_model)
    operator = Operator(
        lambda: [
            normal.activations(*shape),
            normal.weight(d_ff, d_model, dim=0, storage=storage),
            normal.weight(d_model, d_ff, dim=1, storage=storage),
        ],
        3,
        [shape],
        mlp,
        lambda x, up, down: F.silu(x @ up.T) @ down.T,
        mlp_flops(batch * n_rows, d_model, d_ff, pass_),
        mlp_bytes(batch * n_rows, d_model, storage, normal.dtype.itemsize, pass_),
    )
    return _workload(operator, normal, pass_)


def mixture_heads_workload(parameters: dict, pass_: str, device: torch.device) -> Workload:
    """An MLP a component of every target: d_model → d_ff → 3 (weight, mean, log sigma)."""
    from tnp.ops.mixture_heads import mixture_heads

    names = ("batch", "n_q", "n_components", "d_model", "d_ff", "d_ff_storage")
    batch, n_rows, n_components, d_model, d_ff, storage = (parameters[name] for name in names)
    normal = Normal(parameters, device)
    sizes = (batch * n_rows, n_components, d_model)

    def reference(x, up, down):
        hidden = F.silu(torch.einsum("bnd,kfd->bnkf", x, up))
        return torch.einsum("bnkf,kof->bnko", hidden, down)

    operator = Operator(
        lambda: [
            normal.activations(batch, n_rows, d_model),
            normal.weight(n_components, d_ff, d_model, dim=1, storage=storage),
            normal.weight(n_components, N_OUTPUTS, d_ff, dim=2, storage=storage),
        ],
        3,
        [(batch, n_rows, n_components, N_OUTPUTS)],
        mixture_heads,
        reference,
        heads_flops(*sizes, d_ff, N_OUTPUTS, pass_),
        heads_bytes(*sizes, storage, N_OUTPUTS, normal.dtype.itemsize, pass_),
    )
    return _workload(operator, normal, pass_)


def mixture_nll_workload(parameters: dict, pass_: str, device: torch.device) -> Workload:
    """Loss of float32 parameters, and its gradient.

    An implementation may compute the gradient along with the loss: its backward alone would not
    say what it costs, so the pass "backward" is forward and backward, of all of them.
    """
    from tnp.ops.mixture_nll import mixture_nll

    batch, n_rows, n_components = (parameters[name] for name in ("batch", "n_q", "n_components"))
    normal = Normal(parameters, device)

    def loss(parameters: torch.Tensor, y: torch.Tensor, *, implementation: str) -> torch.Tensor:
        return mixture_nll(parameters, y, SIGMA_MIN, implementation=implementation)

    def reference(parameters, y):
        logits, mu, log_sigma = parameters.unbind(-1)
        sigma = log_sigma.exp() + SIGMA_MIN
        densities = torch.distributions.Normal(mu, sigma, validate_args=False).log_prob(y)
        return -torch.logsumexp(logits.log_softmax(-1) + densities, -1).mean()

    operator = Operator(
        lambda: [
            normal.activations(batch, n_rows, n_components, N_OUTPUTS, dtype=torch.float32),
            normal.activations(batch, n_rows, 1, dtype=torch.float32),
        ],
        1,
        [()],
        loss,
        reference,
        None,
        nll_bytes(batch * n_rows, n_components, pass_),
        forward_in_backward=True,
    )
    return _workload(operator, normal, pass_)


def matmul_workload(parameters: dict, pass_: str, device: torch.device) -> Workload:
    """The arithmetic ceiling: [n, n] @ [n, n] through PyTorch, n = 8192 unless `n_q` says."""
    n = parameters.get("n_q") or MATMUL_SIZE
    dtype = getattr(torch, parameters["dtype"])
    generator = torch.Generator(device).manual_seed(parameters["replicate"])
    a, b = (torch.randn(n, n, dtype=dtype, device=device, generator=generator) for _ in "ab")
    rows = slice(n - min(n, 64), n)
    return Workload(
        lambda implementation: [lambda: a @ b],
        2.0 * n**3,
        3.0 * n**2 * dtype.itemsize,
        lambda product: [(product[rows], a[rows].double() @ b.double())],
    )


def copy_workload(parameters: dict, pass_: str, device: torch.device) -> Workload:
    """The bandwidth ceiling: 1 GiB read and as much written, by a kernel.

    Not by `copy_`: in a CUDA graph that is a copy engine's work, which reached 2.7 TB/s on an H200
    where kernels move 4.2.
    """
    generator = torch.Generator(device).manual_seed(parameters["replicate"])
    source = torch.randn(COPY_BYTES // 4, device=device, generator=generator)
    target = torch.empty_like(source)
    return Workload(
        lambda implementation: [lambda: torch.neg(source, out=target)],
        None,
        2.0 * COPY_BYTES,
        lambda copied: [(copied, -source)],
    )


WORKLOADS = {
    "attention": attention_workload,
    "rms_norm": rms_norm_workload,
    "mlp": mlp_workload,
    "mixture_heads": mixture_heads_workload,
    "mixture_nll": mixture_nll_workload,
    "matmul": matmul_workload,
    "copy": copy_workload,
}
