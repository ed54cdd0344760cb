"""Negative log-likelihood of targets under the Gaussian mixture the heads predict.

    nll = mean over targets of −logsumexp_k(log_softmax(logit_weight)_k + log N(y; mu_k, sigma_k²))
    sigma_k = exp(log_sigma_k) + sigma_min

All of it in float32 (float64 where given float64), in log space throughout. With several output
dimensions a component is a product of independent Gaussians over them.
"""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING

from tnp.contract import Case, Operator, Work, triton_from
from tnp.inputs import require_floats, require_number, require_one_device
from tnp.ops.cross_entropy import condition
from tnp.ops.declared import by_pytorch, by_triton

if TYPE_CHECKING:
    import torch

MAX_COMPONENTS = 64
MAX_D_Y = 4


def split_parameters(
    parameters: torch.Tensor, sigma_min: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[..., K, 1 + 2·d_y] → log weights [..., K], mu and log sigma [..., K, d_y], in float32."""
    import torch

    if parameters.dtype != torch.float64:
        parameters = parameters.float()
    d_y = (parameters.shape[-1] - 1) // 2
    log_weight = torch.log_softmax(parameters[..., 0], dim=-1)
    mu, log_sigma = parameters[..., 1:].split(d_y, dim=-1)
    if sigma_min > 0.0:
        floor = torch.full_like(log_sigma, math.log(sigma_min))
        log_sigma = torch.logaddexp(log_sigma, floor)
    return log_weight, mu, log_sigma


def reference(parameters, y, sigma_min, floor=False):
    """The formula in PyTorch; `sigma_min` is read where there is a `floor`."""
    import torch

    log_weight, mu, log_sigma = split_parameters(parameters, sigma_min if floor else 0.0)
    z = (y.unsqueeze(-2) - mu) * torch.exp(-log_sigma)
    log_normal = -0.5 * z.square() - log_sigma - 0.5 * math.log(2.0 * math.pi)
    return -torch.logsumexp(log_weight + log_normal.sum(-1), dim=-1).mean()


def describe(parameters, y, floor=False) -> dict:
    """Sizes; ValueError where the tensors do not go together or hold nothing."""
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
    sizes = {"rows": math.prod(y.shape[:-1]), "n_components": parameters.shape[-2]}
    double = y.itemsize == 8  # then all of it is in float64
    return sizes | {"d_y": y.shape[-1]} | ({"dtype": "float64"} if double else {})


def draw(case, random) -> dict:
    """Normal numbers; y a float32 view of every second target.

    A case may say the factor of the `logits`, the scale of every `sigma`, and the `batch` by which
    targets are grouped (1).
    """
    import torch

    problem, batch = case.problem, case["batch"] or 1
    n, d_y = problem["rows"] // batch, problem["d_y"]
    parameters = random(batch, n, problem["n_components"], 1 + 2 * d_y, dtype=torch.float32)
    parameters[..., 0] *= case["logits"] or 1.0
    parameters[..., 1 + d_y :] += math.log(case["sigma"] or 1.0)
    y = random(batch, 2 * n, d_y, dtype=torch.float32)[:, ::2]
    return {"parameters": parameters.to(random.dtype), "y": y}


def work(case, pass_) -> Work:
    """Parameters and y read once; with the gradient, which is made along with the loss, written."""
    problem = case.problem
    targets = 4 * problem["rows"] * problem["d_y"]
    parameters = problem["rows"] * problem["n_components"] * (1 + 2 * problem["d_y"])
    parameters *= problem.itemsize
    return Work({}, parameters + targets, 4 if pass_ == "forward" else parameters)


def _case(batch, n, dtype="float32", k=10, d_y=1, floor=False, **draw) -> Case:
    return OPERATOR.case(dtype, batch * n, k, d_y, floor=floor, batch=batch, **draw)


def cases(target) -> list[Case]:
    """Both sides of a program's targets, few and many components, and the extremes that training
    can reach.
    """
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
        *extremes,
    ]


def within(model, run):
    """Of a neural process, whose heads give float32."""
    if "n_components" not in model:
        return None
    return OPERATOR.problem(
        "float32",
        rows=run["batch"] * run["n_target"],
        n_components=model["n_components"],
        d_y=model.get("d_y", 1),
        floor=model.get("sigma_min", 0.0) > 0.0,
    )


def _last_component_missing(parameters, y, sigma_min, floor=False):
    import torch

    last = torch.zeros_like(parameters)
    last[..., -1, 0] = 1e4
    return reference(parameters - last, y, sigma_min, floor)


def _fused(call):
    problem = call.problem
    if problem["n_components"] > MAX_COMPONENTS:
        return f"it takes at most {MAX_COMPONENTS} components, not {problem['n_components']}"
    if problem["d_y"] > MAX_D_Y:
        return f"it takes at most {MAX_D_Y} dimensions of y, not {problem['d_y']}"
    return triton_from(80)(call)


OPERATOR = Operator(
    "mixture_nll",
    inputs=("parameters", "y"),
    outputs=("loss",),
    sizes=("rows", "n_components", "d_y"),
    scalars={"sigma_min": 1e-3},
    options={"floor": bool},  # whether sigma_min counts: a kernel without it does less
    differentiated=("parameters", "y"),
    keeps=(),
    backward_with_forward=True,
    implementations=(
        *by_pytorch(reference, options=("floor",)),
        by_triton(
            "fused",
            "mixture_nll",
            "tnp.ops.mixture_nll.triton_mixture_nll",
            supported=_fused,
            options=("floor",),
        ),
    ),
    describe=describe,
    draw=draw,
    reference=reference,
    work=work,
    cases=cases,
    condition=condition,
    within=within,
    fixed=("d_y",),
    controls={
        "values are shifted by a target": lambda parameters, y, sigma_min, floor=False: reference(
            parameters, y.roll(1, -2), sigma_min, floor
        ),
        "the last component is missing": _last_component_missing,
        "the floor is missing": lambda parameters, y, sigma_min, floor=False: reference(
            parameters, y, 0.0
        ),
    },
)


def mixture_nll(
    parameters: torch.Tensor,
    y: torch.Tensor,
    sigma_min: float = 0.0,
    *,
    implementation: str = "torch",
) -> torch.Tensor:
    """Mean nats per target.

    Args:
        parameters: [..., K, 1 + 2·d_y], per component logit_weight, mu, log_sigma; bfloat16,
            float16 or float32 (float64 for `torch` only). K at most 64 and d_y at most 4 for
            `fused`.
        y: [..., d_y], at least one target.
        sigma_min: floor under every standard deviation, in units of y; a finite number, 0 for none.
        implementation: a name of `tnp.catalog`, or "auto".

    Returns:
        A scalar, float32 (float64 for float64 parameters or y). Where a target lies so far from
        every component that its z² passes the dtype's range, it is inf, and that target's gradient
        NaN.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together, or no targets.
        RuntimeError: the implementation cannot run here, with the reason.
    """
    import tnp.dispatch as dispatch

    if sigma_min.__class__ is not float or not 0.0 <= sigma_min < math.inf:
        sigma_min = _checked(sigma_min)
    floor = (("floor", True),) if sigma_min > 0.0 else ()
    return dispatch.call(OPERATOR, implementation, (parameters, y), (sigma_min,), floor)


def _checked(sigma_min: float) -> float:
    require_number("sigma_min", sigma_min)
    if not 0 <= sigma_min < math.inf:
        raise ValueError(f"sigma_min is {sigma_min}: it must be finite and not negative")
    return float(sigma_min)
