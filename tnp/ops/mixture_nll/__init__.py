"""Computes targets' negative log-likelihood under the Gaussian mixture that the heads predict.

    nll = mean over targets of −logsumexp_k(log_softmax(logit_weight)_k + log N(y; mu_k, sigma_k²))
    sigma_k = exp(log_sigma_k) + sigma_min

All is computed in log space, in float32, or in float64 if an input is float64. With several output
dimensions a component is a product of independent Gaussians. If samples differ in their numbers of
targets, the mean is over all targets that are no padding.
"""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING

from tnp.dispatch.spec import Case, Operator, Work, triton_from
from tnp.ops._shared.declared import by_pytorch, by_triton, numbers_out_of_range
from tnp.ops.cross_entropy import condition
from tnp.util.checks import require_between, require_floats, require_number, require_one_device

if TYPE_CHECKING:
    import torch

__all__ = ["mixture_nll"]

MAX_COMPONENTS = 64
MAX_D_Y = 4


def split_parameters(
    parameters: torch.Tensor, sigma_min: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns weights' logits [..., K], mu and log sigma [..., K, d_y] in float32."""
    import torch

    if parameters.dtype != torch.float64:
        parameters = parameters.float()
    d_y = (parameters.shape[-1] - 1) // 2
    mu, log_sigma = parameters[..., 1:].split(d_y, dim=-1)
    if sigma_min > 0.0:
        floor = torch.full_like(log_sigma, math.log(sigma_min))
        log_sigma = torch.logaddexp(log_sigma, floor)
    return parameters[..., 0], mu, log_sigma


def reference(parameters, y, n_targets, sigma_min, floor=False):
    """Computes the formula in PyTorch. `sigma_min` is read only with a `floor`."""
    import torch

    counted = None
    if n_targets is not None:
        counted = torch.arange(y.shape[1], device=y.device) < n_targets[:, None]
        # Padding is replaced before anything is computed: a NaN times 0 would be NaN in the
        # gradient.
        parameters = torch.where(counted[..., None, None], parameters, 0.0)
        y = torch.where(counted[..., None], y, 0.0)
    logits, mu, log_sigma = split_parameters(parameters, sigma_min if floor else 0.0)
    log_weight = torch.log_softmax(logits, dim=-1)
    z = (y.unsqueeze(-2) - mu) * torch.exp(-log_sigma)
    log_normal = -0.5 * z.square() - log_sigma - 0.5 * math.log(2.0 * math.pi)
    log_density = torch.logsumexp(log_weight + log_normal.sum(-1), dim=-1)
    if counted is None:
        return -log_density.mean()
    outside = ((n_targets < 0) | (n_targets > y.shape[1])).any()
    loss = -torch.where(counted, log_density, 0.0).sum() / counted.sum()
    return loss * torch.where(outside, float("nan"), 1.0)


def describe(parameters, y, n_targets, floor=False) -> dict:
    """Returns the sizes. Raises ValueError if the tensors do not fit together, or are empty."""
    together = parameters.dim() > 1 and y.dim() > 0 and parameters.shape[:-2] == y.shape[:-1]
    if not together or parameters.shape[-1] != 1 + 2 * y.shape[-1]:
        raise ValueError(
            f"parameters are {tuple(parameters.shape)} and y {tuple(y.shape)}: "
            "they must be [..., K, 1 + 2·d_y] and [..., d_y]"
        )
    if y.numel() == 0 or parameters.numel() == 0:
        raise ValueError(
            f"parameters are {tuple(parameters.shape)} and y {tuple(y.shape)}: "
            "the mean needs at least one target and one component"
        )
    require_floats(parameters=parameters, y=y)
    require_one_device(parameters=parameters, y=y)
    if n_targets is not None:
        if y.dim() != 3 or n_targets.shape != y.shape[:1] or str(n_targets.dtype) != "torch.int32":
            raise ValueError(
                f"n_targets is {n_targets.dtype} {tuple(n_targets.shape)} and y {tuple(y.shape)}: "
                "they must be int32 [B] and [B, N, d_y]"
            )
        require_one_device(y=y, n_targets=n_targets)
    sizes = {"rows": math.prod(y.shape[:-1]), "n_components": parameters.shape[-2]}
    double = y.itemsize == 8  # then all is computed in float64
    return sizes | {"d_y": y.shape[-1]} | ({"dtype": "float64"} if double else {})


def draw(case, random) -> dict:
    """Draws normal numbers. y is a float32 view of every second target.

    A case may say the factor of the `logits`, the scale of every `sigma`, and the `batch` by which
    targets are grouped (1). If samples differ in their numbers of targets, padding would be the
    larger part of the loss.
    """
    import torch

    problem, batch = case.problem, case["batch"] or 1
    n, d_y = problem["rows"] // batch, problem["d_y"]
    parameters = random(batch, n, problem["n_components"], 1 + 2 * d_y, dtype=torch.float32)
    parameters[..., 0] *= case["logits"] or 1.0
    parameters[..., 1 + d_y :] += math.log(case["sigma"] or 1.0)
    y = random(batch, 2 * n, d_y, dtype=torch.float32)[:, ::2]
    n_targets = None
    if problem["n_targets"]:
        n_targets = random.integers(1, n, batch)
        if y.device.type != "meta":
            padding = torch.arange(n, device=y.device) >= n_targets[:, None]
            y[padding] = parameters[padding] = 1e4
    return {"parameters": parameters.to(random.dtype), "y": y, "n_targets": n_targets}


def out_of_range(case, inputs):
    """Yields numbers of targets out of range, which spoil the loss and their sample's gradient."""
    n = inputs["y"].shape[1]
    for wrong, right, spoiled in numbers_out_of_range(
        inputs, "n_targets", 0, n, "dparameters", "dy"
    ):
        yield wrong, right, spoiled | {"loss": spoiled["dy"].any()}


def work(case, pass_) -> Work:
    """Counts parameters and y read once, and with a gradient written once, forward."""
    problem = case.problem
    targets = 4 * problem["rows"] * problem["d_y"]
    parameters = problem["rows"] * problem["n_components"] * (1 + 2 * problem["d_y"])
    parameters *= problem.itemsize
    return Work({}, parameters + targets, 4 if pass_ == "forward" else parameters)


def _case(batch, n, dtype="float32", k=10, d_y=1, floor=False, n_targets=False, **draw) -> Case:
    options = {"floor": floor, "n_targets": n_targets}
    return OPERATOR.case(dtype, batch * n, k, d_y, **options, batch=batch, **draw)


def cases(target) -> list[Case]:
    """Covers both sides of a program's targets, few and many components, and extremes."""
    extremes = [
        _case(
            *((3, 67) if target.kind == "cuda" else (1, 33)),
            logits=logits,
            sigma=sigma,
            floor=floor,
        )
        for logits, sigma, floor in product((1.0, 1e2, 1e4), (1e-6, 1.0, 1e6), (False, True))
    ]
    if target.kind != "cuda":
        return [
            _case(2, 67, "bfloat16"),
            _case(1, 1, k=1),
            _case(1, 7, k=64, d_y=4, floor=True),
            _case(2, 17, "float16", k=3, d_y=2),
            _case(3, 23, n_targets=True),
            _case(5, 7, "bfloat16", k=3, d_y=2, n_targets=True),
            *extremes,
        ]
    return [
        _case(64, 500, "bfloat16"),
        _case(4, 1000, "bfloat16"),
        _case(4, 10_000, "bfloat16", floor=True),
        _case(1, 1, "bfloat16"),
        *(_case(1, n) for n in (31, 32, 33, 205_000)),
        _case(3, 77, k=1),
        _case(3, 77, k=64, d_y=4, floor=True),
        _case(3, 77, "bfloat16", k=33, d_y=2),
        _case(2, 100, "float16", k=3, d_y=3),
        _case(64, 500, n_targets=True),
        _case(3, 77, "bfloat16", k=33, d_y=2, n_targets=True),
        _case(1, 33, floor=True, n_targets=True),
        *extremes,
    ]


def within(model, run):
    """Returns the problem of a neural process, whose heads give float32."""
    if "n_components" not in model:
        return None
    return OPERATOR.problem(
        "float32",
        rows=run["batch"] * run["n_target"],
        n_components=model["n_components"],
        d_y=model.get("d_y", 1),
        floor=model.get("sigma_min", 0.0) > 0.0,
    )


def _last_component_missing(parameters, y, n_targets, sigma_min, floor=False):
    import torch

    last = torch.zeros_like(parameters)
    last[..., -1, 0] = 1e4
    return reference(parameters - last, y, n_targets, sigma_min, floor)


def _padding_counted(parameters, y, n_targets, sigma_min, floor=False):
    """Returns the mean over all rows, with padding. Only cases whose samples differ show it."""
    if n_targets is None:
        return reference(parameters, y, None, sigma_min, floor)
    loss = reference(parameters, y, n_targets, sigma_min, floor)
    return loss * (n_targets.sum() / y.shape[:2].numel())


def _fused(call):
    if (reason := triton_from(80)(call)) is not None:
        return reason
    problem = call.problem
    if problem["n_components"] > MAX_COMPONENTS:
        return f"K is {problem['n_components']}, and it takes at most {MAX_COMPONENTS} components"
    if problem["d_y"] > MAX_D_Y:
        return f"d_y is {problem['d_y']}, and it takes y of at most {MAX_D_Y} dimensions"
    return None


OPERATOR = Operator(
    "mixture_nll",
    phase=8,
    inputs=("parameters", "y", "n_targets?"),
    outputs=("loss",),
    sizes=("rows", "n_components", "d_y"),
    scalars={"sigma_min": 1e-3},
    options={"floor": bool},  # whether sigma_min is not 0; a kernel without it does less
    differentiated=("parameters", "y"),
    keeps=(),
    backward_with_forward=True,
    implementations=(
        *by_pytorch(reference, options=("floor", "n_targets")),
        by_triton(
            "fused",
            "mixture_nll",
            "tnp.ops.mixture_nll.triton_mixture_nll",
            supported=_fused,
            options=("floor", "n_targets"),
        ),
    ),
    describe=describe,
    draw=draw,
    reference=reference,
    work=work,
    cases=cases,
    out_of_range=out_of_range,
    condition=condition,
    within=within,
    controls={
        "values are shifted by a target": lambda parameters, y, n_targets, sigma_min, floor=False: (
            reference(parameters, y.roll(1, -2), n_targets, sigma_min, floor)
        ),
        "the last component is missing": _last_component_missing,
        "the floor is missing": lambda parameters, y, n_targets, sigma_min, floor=False: reference(
            parameters, y, n_targets, 0.0
        ),
        "padding is counted": _padding_counted,
    },
)


def mixture_nll(
    parameters: torch.Tensor,
    y: torch.Tensor,
    *,
    sigma_min: float = 0.0,
    n_targets: torch.Tensor | None = None,
    implementation: str = "torch",
) -> torch.Tensor:
    """Returns the mean negative log-likelihood per target, in nats.

    Args:
        parameters: [..., K, 1 + 2·d_y], for each component logit_weight, mu and log_sigma.
            bfloat16, float16 or float32 (float64 for `torch` only). `fused` takes K up to 64 and
            d_y up to 4.
        y: [..., d_y], at least one target.
        sigma_min: added to every standard deviation, in units of y; finite, 0 for none.
        n_targets: int32 [B], each from 0 to N, and not all 0, or None for N everywhere. Parameters
            are then [B, N, K, 1 + 2·d_y] and y [B, N, d_y]. Later targets of a sample are padding.
            They may hold anything, also NaN, and have gradient exactly 0. A number out of range is
            a ValueError on the CPU. On CUDA it makes the loss and its sample's gradient NaN, or
            with TNP_CHECK=1 `fused` asserts.
        implementation: a name of `tnp.dispatch.registry`, or "auto".

    Returns:
        A scalar, float32 (float64 for float64 parameters or y). If a target lies so far from every
        component that z² overflows, the loss is inf, and that target's gradient NaN.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, there are no targets, or on the
            CPU n_targets are out of range.
        RuntimeError: the implementation cannot run here, with the reason.
    """
    import tnp.dispatch.call as dispatch

    if sigma_min.__class__ is not float or not 0.0 <= sigma_min < math.inf:
        sigma_min = _checked(sigma_min)
    if n_targets is not None and getattr(y, "ndim", 0) == 3:  # else `describe` refuses
        require_between("n_targets", n_targets, 0, y.shape[1])
    floor = (("floor", True),) if sigma_min > 0.0 else ()
    return dispatch.call(OPERATOR, implementation, (parameters, y, n_targets), (sigma_min,), floor)


def _checked(sigma_min: float) -> float:
    require_number("sigma_min", sigma_min)
    if not 0 <= sigma_min < math.inf:
        raise ValueError(f"sigma_min is {sigma_min}: it must be finite and not negative")
    return float(sigma_min)
