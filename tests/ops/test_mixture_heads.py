"""Tests the mixture heads: PyTorch's forms, chunks, padding, a saved z.

The gate compares what is ours with float64 (`tests.gates.test_operators`).
"""

import pytest
import torch

from tests.ops.problems import DEVICE, assert_equal, by, setting
from tnp.dispatch import devices, tuned_tables
from tnp.dispatch.selection import kernels_of
from tnp.dispatch.spec import Call
from tnp.gates.checks import max_abs_error
from tnp.gates.results import Setting
from tnp.ops import mixture_heads as operator
from tnp.ops.mixture_heads import OPERATOR, mixture_heads, saved_z, triton_heads


def heads(
    rows: int = 70, d_ff: int = 48, real: int = 42, n: int = 3, dtype: str = "bfloat16"
) -> Setting:
    sizes = {"rows": rows, "d_model": 32, "d_ff": d_ff, "n_components": n, "n_outputs": 3}
    return setting(OPERATOR, "fused", dtype, {"d_ff_real": real}, **sizes)


@pytest.mark.parametrize("implementation", ["torch", "loop", "bmm", "grouped_mm"])
def test_pytorchs_forms_agree(implementation):
    """They agree to rounding: in float32, and `grouped_mm` in bfloat16 on a GPU."""
    if implementation == "grouped_mm" and DEVICE.type == "cpu":
        pytest.skip(f"{implementation} does not run here")
    dtype = "bfloat16" if implementation == "grouped_mm" else "float32"
    problem = heads(dtype=dtype)
    tolerance = 2e-2 if dtype == "bfloat16" else 1e-5
    found = by(problem, implementation)
    for name, exact in problem.exact.items():
        assert max_abs_error(found[name], exact) <= tolerance * exact.abs().max(), name
    assert found["out"].dtype == getattr(torch, dtype)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="float32 is for the CPU alone")
def test_grouped_mm_multiplies_the_right_operands():
    """On the CPU PyTorch computes its forward pass, which no implementation offers there."""
    x, up, down = heads(dtype="float32").inputs.values()
    with torch.no_grad():
        out = operator._grouped_mm(x.view(2, 35, 32), up, down)
        expected = mixture_heads(x.view(2, 35, 32), up, down)
    assert out.shape == (2, 35, 3, 3)
    assert max_abs_error(out, expected) <= 1e-5


def test_chunks_of_rows_add_up(monkeypatch):
    """Three chunks, the last one short, share one buffer."""
    problem = heads(rows=150, n=2)
    whole = by(problem, "fused")
    monkeypatch.setattr(triton_heads, "CHUNK_ROWS", 64)
    tuned_tables.refresh()  # plans do not notice edited constants
    chunked, again = (by(problem, "fused") for _ in range(2))
    tuned_tables.refresh()
    assert_equal(again, chunked)
    for name, x in whole.items():
        assert max_abs_error(chunked[name], x) <= 1e-5 * x.abs().max(), name


def of_saved_z(
    problem: Setting,
    wanted: tuple[str, ...] = ("x", "up", "down"),
    dout: torch.Tensor | None = None,
) -> dict[str, torch.Tensor | None]:
    """Returns gradients by the kernel that reads z, which only Hopper's forward kernel saves.

    It is plain Triton and runs where any of it does; here z is PyTorch's.
    """
    x, up, down = problem.inputs.values()
    call = Call(problem.case.problem, problem.target, wanted)
    z = (x.view(-1, x.shape[-1]) @ up.to(x.dtype).flatten(0, 1).T).contiguous()
    like = torch.empty(*x.shape[:-1], *down.shape[:2], device=x.device)
    inputs = (problem.upstream("out", like) if dout is None else dout,), (x, up, down), (z,)
    launch = saved_z.prepare_backward(call, None, inputs)
    gradients = launch(inputs, ())
    return dict(zip(("dx", "dup", "ddown"), gradients, strict=True))


@pytest.mark.parametrize(("rows", "dtype"), [(1, "float16"), (70, "float32"), (300, "bfloat16")])
def test_gradients_of_a_saved_z(rows, dtype):
    """Two tiles of hidden units a head; ragged rows, and more than one program walks."""
    problem = heads(rows=rows, d_ff=256, real=200, dtype=dtype)
    found = of_saved_z(problem)
    judged = list(problem.judged(found))
    assert {name for name, _, _ in judged} == {"dx", "dup", "ddown"}
    for name, ratio, bound in judged:
        assert ratio <= bound, name
    assert (found["dup"][:, 200:] == 0).all() and (found["ddown"][..., 200:] == 0).all()


def test_chunks_of_a_saved_z_add_up(monkeypatch):
    """Three chunks, the last one short, share one buffer; what is saved is left alone."""
    problem = heads(rows=150, d_ff=128, real=100)
    whole = of_saved_z(problem)
    monkeypatch.setattr(saved_z, "CHUNK_ROWS", 64)
    chunked, again = of_saved_z(problem), of_saved_z(problem)
    assert_equal(again, chunked)
    for name, x in whole.items():
        assert max_abs_error(chunked[name], x) <= 1e-5 * x.abs().max(), name


def test_gradients_of_a_saved_z_alone_and_of_an_expanded_gradient():
    problem = heads(d_ff=128, real=100)
    every = of_saved_z(problem)
    for name in ("x", "up", "down"):
        alone = of_saved_z(problem, wanted=(name,))
        assert_equal({f"d{name}": alone[f"d{name}"]}, {f"d{name}": every[f"d{name}"]})
        assert all(x is None for result, x in alone.items() if result != f"d{name}")
    ones = torch.ones(70, 3, 3, device=DEVICE)
    expanded = torch.ones((), device=DEVICE).expand(70, 3, 3)
    assert_equal(of_saved_z(problem, dout=expanded), of_saved_z(problem, dout=ones))


def test_padding_is_exact_and_has_no_gradient():
    """A hidden unit of weight 0 is 0 behind SiLU, and so are its gradients."""
    found = by(heads(), "fused")
    assert (found["dup"][:, 42:] == 0).all() and (found["ddown"][..., 42:] == 0).all()
    assert found["out"].dtype == torch.float32  # as it was summed


def hopper_call(gpu="H100", dtype="bfloat16", wanted=("x", "up", "down"), **changes: int) -> Call:
    sizes = {"rows": 777, "d_model": 512, "d_ff": 1408, "n_components": 10, "n_outputs": 3}
    return Call(OPERATOR.problem(dtype, **sizes | changes), devices.named(gpu), wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_parts_of_the_hidden_width_add_up(dtype):
    """The last part of 16 rows is ragged. A gradient may be asked for as well."""
    problem = heads(rows=16, d_ff=200, real=170, dtype=dtype)
    assert triton_heads.FEW_ROWS_CONFIGS[2].block_f < 200
    found, again = by(problem, "fused"), by(problem, "fused")
    assert_equal(again, found)
    for name, exact in problem.exact.items():
        allowed = 2e-2 if dtype == "bfloat16" else 1e-5
        assert max_abs_error(found[name], exact) <= allowed * exact.abs().max(), name


def test_why_z_is_not_saved():
    fused = next(one for one in OPERATOR.implementations if one.name == "fused")
    forward = kernels_of(fused.forward)["hopper"]
    assert forward.saves == "z"
    assert forward.refuses(hopper_call()) is None
    assert "not wanted" in forward.refuses(hopper_call(wanted=()))
    assert "more than 40,000 rows" in forward.refuses(hopper_call(rows=40_001))
    assert "9.0" in forward.refuses(hopper_call("A100"))
    shapes = (2, 35, 512), (3, 1400, 512), (3, 3, 1400)
    (out,), (z,) = forward.empty((), [torch.empty(shape, device="meta") for shape in shapes])
    assert out.shape == (2, 35, 3, 3) and z.shape == (70, 3 * 1408)  # 1400 is padded
