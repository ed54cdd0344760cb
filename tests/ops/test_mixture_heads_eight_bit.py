"""Tests the mixture heads in 8 bits: the units of z and dz, chunks, bad input, refusals.

The gate compares them with float64 and with the emulation (`tests.gates.test_operators`).
"""

import math

import pytest
import torch

from tests.ops.problems import DEVICE, assert_equal, by, setting
from tnp.dispatch import devices, plans, tuned_tables
from tnp.dispatch.spec import Call
from tnp.gates.checks import max_abs_error, relative_error
from tnp.gates.results import Setting
from tnp.ops._shared.blocks_8bit import row_at
from tnp.ops.mixture_heads import OPERATOR, composed_8bit, mixture_heads, triton_8bit

IN_8_BITS = next(one for one in OPERATOR.implementations if one.name == "e4m3")
# Places of rows in a panel's line, by the kernel's own function, which is plain arithmetic.
ROWS = row_at.fn(torch.arange(128))


def heads(rows: int = 70, d_ff: int = 48, real: int = 42, n: int = 3) -> Setting:
    sizes = {"rows": rows, "d_model": 32, "d_ff": d_ff, "n_components": n, "n_outputs": 3}
    return setting(OPERATOR, "e4m3", "bfloat16", {"d_ff_real": real}, **sizes)


@pytest.mark.parametrize(("rows", "d_ff"), [(1, 48), (130, 42), (300, 80)])
def test_results_are_as_exact_as_the_format(rows, d_ff):
    """Ragged rows, and hidden units that are padded or end within a tile."""
    problem = heads(rows=rows, d_ff=d_ff, real=40)
    found = by(problem, "e4m3")
    for name, ratio, bound in problem.judged(found):
        assert ratio <= bound, name
    assert (found["dup"][:, 40:] == 0).all() and (found["ddown"][..., 40:] == 0).all()
    assert found["out"].dtype == found["dup"].dtype == torch.float32


def test_chunks_of_rows_add_up(monkeypatch):
    """With z saved and with z computed again, in whole blocks of 128 rows and a short one."""
    problem = heads(rows=300)
    whole = by(problem, "e4m3")
    monkeypatch.setattr(composed_8bit, "CHUNK_ROWS", 128)
    for saved in (composed_8bit.SAVED_ROWS, 0):
        monkeypatch.setattr(composed_8bit, "SAVED_ROWS", saved)
        tuned_tables.refresh()  # plans do not notice edited constants
        chunked = by(problem, "e4m3")
        tuned_tables.refresh()
        for name, x in whole.items():
            # dx of a chunk is a product of its own, whose sums may have another order.
            allowed = 2.0**-8 if name == "dx" else 1e-5
            assert max_abs_error(chunked[name], x) <= allowed * x.abs().max(), name


def test_rows_and_panels_of_dz_are_equal_and_fill_the_range():
    """No number exceeds the bound, which is met by dout along a column of down at a large z."""
    n, n_heads, width = 200, 2, 48
    generator = torch.Generator().manual_seed(0)
    down = torch.randn(n_heads, 3, width, generator=generator)
    head, unit = divmod(int(down.norm(dim=1).argmax()), width)
    dout = 1e-20 * torch.randn(n, n_heads, 3, generator=generator)
    dout[:, head] = 1e-20 * 4.0 * down[head, :, unit]
    z = torch.full((n, n_heads * width), 2.375).to(torch.float8_e4m3fn)  # silu'(2.4) = 1.0998
    scale = torch.ones(n)
    dz, _ = triton_8bit.dz(n, n_heads, width)(*(x.to(DEVICE) for x in (z, scale, dout, down)))
    rows, panels = dz.rows.float().cpu(), dz.panels.float().cpu()
    assert 200.0 < rows.abs().max() <= 448.0
    lines = torch.zeros(256, n_heads * width)
    lines[:n] = rows
    for block in range(2):
        assert torch.equal(panels[block].T, lines[128 * block :][ROWS])
    exact = torch.einsum("tko,kof->tkf", dout.double(), down.double()) * 1.0998
    found = rows.double() * dz.scale.double().cpu()[:, None]
    assert relative_error(found, exact.flatten(1)) < 0.04


def test_gradients_keep_their_accuracy_however_small():
    problem = heads()

    def gradient(factor: float) -> torch.Tensor:
        leaves = [x.detach().requires_grad_() for x in problem.inputs.values()]
        out = mixture_heads(*leaves, implementation="e4m3")
        dout = problem.upstream("out", out.detach()) * factor
        return torch.autograd.grad(out, leaves[1], dout)[0].double() / factor

    assert torch.equal(gradient(1.0), gradient(2.0**-60))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_bad_numbers_show_in_their_rows_alone(bad):
    inputs = [x.detach().clone() for x in heads().inputs.values()]
    inputs[0][3, 5] = bad
    inputs[0][7] = 0.0
    inputs = [x.requires_grad_() for x in inputs]
    out = mixture_heads(*inputs, implementation="e4m3")
    shown = out.isnan().flatten(1)
    assert shown[3].all() and not shown[torch.arange(70) != 3].any()
    assert not out[7].any()
    dout = torch.ones_like(out)
    dout[5, 1, 2] = bad
    dx = torch.autograd.grad(out, inputs[0], dout)[0].isnan()
    assert (
        dx.all(1).nonzero().flatten().tolist() == dx.any(1).nonzero().flatten().tolist() == [3, 5]
    )


def test_only_requested_tensors_are_computed_and_saved():
    inputs = tuple(heads().inputs.values())
    outputs, saved = plans.build(OPERATOR, "e4m3", inputs).forward(inputs, ())
    assert saved == ()
    every = plans.build(OPERATOR, "e4m3", inputs, wanted=("x", "up", "down"))
    dout = (torch.ones_like(outputs[0]),)
    results = {}
    for wanted in (("x", "up", "down"), ("x",), ("up",), ("down",)):
        plan = plans.build(OPERATOR, "e4m3", inputs, wanted=wanted)
        outputs, saved = plan.forward(inputs, ())
        found = plan.backward(dout, plan.kept(inputs, outputs), saved, ())
        results[wanted] = dict(zip(("x", "up", "down"), found, strict=True))
    every = results.pop(("x", "up", "down"))
    for (name,), found in results.items():
        assert_equal({name: found.pop(name)}, {name: every[name]})
        assert all(x is None for x in found.values())


def test_refusals_name_the_size():
    def refuses(gpu="H100", **changes: int) -> str:
        sizes = {"rows": 777, "d_model": 512, "d_ff": 1408, "n_components": 10, "n_outputs": 3}
        problem = OPERATOR.problem("bfloat16", **sizes | changes)
        return IN_8_BITS.refuses(Call(problem, devices.named(gpu), ())) or ""

    assert refuses() == ""
    assert "not 5" in refuses(n_outputs=5)
    assert "D is 40" in refuses(d_model=40)
    assert "8.9" in refuses("A100")
