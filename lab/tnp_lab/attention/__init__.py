"""Declares attention in a simple kernel, and in CUDA C++: wmma, CuTe, and a backward with wmma.

`wmma_step_1` to `wmma_step_3` show how `wmma` became fast, and are forward only.
"""

from tnp.dispatch.spec import Call, Implementation, Operation, Reason, triton_from
from tnp_lab import nvrtc
from tnp_lab.declared import by_cuda

OPTIONS = ("base2", "causal", "lse", "n_kv_heads")


def _in_cuda(call: Call, head_dims: tuple[int, ...]) -> Reason:
    p = call.problem
    if p["head_dim"] not in head_dims:
        return f"it takes head_dim {', '.join(map(str, head_dims))}, not {p['head_dim']}"
    if p.dtype == "bfloat16" and call.target.capability < 80:
        return "tensor cores take bfloat16 from compute capability 8.0 on"
    return None


def _in_wmma(call: Call) -> Reason:
    return _in_cuda(call, (64, 128))


def _in_cute(call: Call) -> Reason:
    if call.target.capability < 80:
        return "its instructions need compute capability 8.0 or newer"
    return _in_cuda(call, (32, 64, 128))


BACKWARD = Operation("attention.cuda_backward", ("tnp_lab.attention.cuda_attention:BACKWARD_WMMA",))
_TAKEN = {
    "dtypes": ("bfloat16", "float16"),
    "options": OPTIONS,
}
_LIMITS = {"backward": BACKWARD, **_TAKEN}
WMMA = by_cuda(
    "wmma",
    "attention",
    "tnp_lab.attention.cuda_attention:FORWARD_WMMA",
    _in_wmma,
    title="CUDA C++ with wmma",
    **_LIMITS,
)
CUTE = by_cuda(
    "cute",
    "attention",
    "tnp_lab.attention.cuda_attention:FORWARD_CUTE",
    _in_cute,
    nvrtc.missing_for_cute,
    title="CUDA C++ with CuTe",
    **_LIMITS,
)
WMMA_STEP_1, WMMA_STEP_2, WMMA_STEP_3 = (
    by_cuda(
        f"wmma_step_{step}",
        "attention",
        f"tnp_lab.attention.cuda_attention:FORWARD_WMMA_STEP_{step}",
        _in_wmma,
        title=f"CUDA C++ with wmma, step {step}",
        **_TAKEN,
    )
    for step in (1, 2, 3)
)


# Keys in one tile of `simple`, by head_dim. With 256 at 32, registers spill on sm_86.
MAX_KEYS = {16: 128, 32: 128, 64: 256, 128: 128}
_triton = triton_from(80)


def _in_one_tile(call: Call) -> Reason:
    n_k, head_dim = call.problem["n_k"], call.problem["head_dim"]
    if head_dim not in MAX_KEYS:
        return f"it takes head_dim {', '.join(map(str, MAX_KEYS))}, not {head_dim}"
    if n_k > MAX_KEYS[head_dim]:
        return f"its tile holds {MAX_KEYS[head_dim]} keys and there are {n_k}"
    return _triton(call)


SIMPLE = Implementation(
    "simple",
    forward=Operation("attention.simple", ("tnp_lab.attention.simple:FORWARD",)),
    supported=_in_one_tile,
    dtypes=("bfloat16", "float16"),
    options=OPTIONS,
    selectable=False,
    title="simple kernel",
)
