"""Configurations small enough to measure on any CPU, as the workflow passes them."""

from dataclasses import asdict

from tnp.bench.policy import Policy
from tnp.dispatch.registry import catalog

TIMING = asdict(Policy(0.02, min_samples=5, max_sampling_s=0.05, long_step_s=5.0, long_samples=2))
MODEL = {"d_model": 32, "n_layers": 2, "n_heads": 2, "d_ff": 45, "n_components": 3}


def step_parameters(**changes) -> dict:
    return {
        "config_id": "test--tiny--sdpa_flash",
        "study": "test",
        "shape": "tiny",
        "variant": "sdpa_flash",
        "variant_spec": {"attention": "sdpa_flash"},
        "model": MODEL,
        "batch": 2,
        "n_context": 7,
        "n_target": 5,
        "dtype": "float32",
        "checkpoint": False,
        "cuda_graph": False,
        "optimizer": True,
        "replicate": 0,
        "timing": TIMING,
        "device": "cpu",
        "device_slug": "cpu",
    } | changes


def op_parameters(op: str = "attention", **changes) -> dict:
    """Of PyTorch's plain form; `sizes` are those of another operator than attention."""
    sizes = changes.pop("sizes", {"batch": 2, "n_heads": 2, "n_q": 21, "n_k": 13, "head_dim": 16})
    operator = catalog().operator(op)
    baseline = operator.implementations[0].name
    return {
        "config_id": f"{op}--tiny",
        "op": op,
        "problem": operator.problem("float32", **sizes).json,
        "draw": {},
        "implementations": {baseline: f"{op}--tiny--{baseline}"},
        "shape": "tiny",
        "dtype": "float32",
        "replicate": 0,
        "timing": TIMING,
        "device": "cpu",
        "device_slug": "cpu",
    } | changes
