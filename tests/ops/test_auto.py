"""What "auto" runs, why, and that it is never anything but one of its candidates."""

import json
import logging
from pathlib import Path

import pytest
import torch

from tnp.gates import KERNEL_GATES, blocking_reason, gates_for
from tnp.ops import auto, registry
from tnp.ops.attention import attention
from tnp.ops.embedding import embed_rows
from tnp.ops.mixture_heads import mixture_heads
from tnp.ops.mixture_nll import mixture_nll
from tnp.ops.mlp import mlp
from tnp.ops.rms_norm import add_rms_norm, rms_norm

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MLP = {"rows": 44_000, "d_model": 512, "d_ff": 1408}


@pytest.fixture(autouse=True)
def own_table(tmp_path, monkeypatch):
    monkeypatch.setattr(auto, "TABLE", tmp_path / "implementations.json")
    monkeypatch.setattr(auto, "_choices", {})
    auto.write_table([])
    choose = auto.choose
    yield
    auto.table.cache_clear()
    choose.cache_clear()


@pytest.fixture(autouse=True)
def capability(monkeypatch):
    """A GPU of capability 9.0, or of what this is called with."""

    def set_to(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, minor))

    set_to(9, 0)
    return set_to


def entry(implementation: str, op: str = "mlp", **changes) -> auto.Entry:
    own = {name: changes.pop(name) for name in ("capability", "dtype") if name in changes}
    known = {"op": op, "capability": 90, "dtype": "bfloat16", "sizes": MLP | changes} | own
    return known | {"implementation": implementation}


def chosen(op: str = "mlp", device=GPU, dtype=torch.bfloat16, **sizes) -> auto.Choice:
    return auto.choose(op, device, dtype, tuple((sizes or MLP).items()))


@pytest.mark.parametrize("op", registry.CANDIDATES)
def test_pytorch_runs_on_the_cpu(op):
    auto.write_table([entry("fused", op)])
    reason = "on the CPU kernels only run interpreted"
    assert chosen(op, CPU, **MLP) == auto.Choice(registry.CANDIDATES[op][0], "default", reason)


@pytest.mark.parametrize("op", registry.CANDIDATES)
@pytest.mark.parametrize("found", [(9, 0), (10, 0), (8, 0), (8, 9), (12, 0)])
def test_an_unknown_gpu_runs_ours_on_hopper_and_blackwell(op, found, capability):
    capability(*found)
    if found in ((9, 0), (10, 0)):
        assert chosen(op) == auto.Choice("fused", "default")
        return
    measured = "compute capability {}.{} in bfloat16".format(*found)
    reason = f"nothing was measured on {measured}: python -m tnp.tune"
    assert chosen(op) == auto.Choice(registry.CANDIDATES[op][0], "default", reason)


def test_why_pytorch_runs_is_logged(caplog, capability):
    caplog.set_level(logging.INFO, "tnp.auto")
    capability(8, 0)
    chosen(rows=0, d_model=512, d_ff=1408)
    chosen()
    chosen(device=CPU, **MLP)
    assert [record.getMessage().split("torch, default; ")[1] for record in caplog.records] == [
        "there is nothing to compute",
        "nothing was measured on compute capability 8.0 in bfloat16: python -m tnp.tune",
        "on the CPU kernels only run interpreted",
    ]


def test_its_own_sizes_are_tuned_and_any_others_nearest():
    auto.write_table([entry("torch", rows=1_000), entry("single"), entry("fused", rows=200_000)])
    assert chosen() == auto.Choice("single", "tuned")
    assert chosen(**MLP | {"rows": 100_000}) == auto.Choice("fused", "nearest")
    assert chosen(**MLP | {"rows": 1}) == auto.Choice("torch", "nearest")


def test_entries_of_another_gpu_dtype_or_operator_do_not_count():
    others = (entry("torch", capability=80), entry("torch", dtype="float16"))
    auto.write_table([*others, entry("torch", op="rms_norm")])
    assert chosen() == auto.Choice("fused", "default")


def test_what_is_no_candidate_is_never_chosen():
    for op, name in (("mixture_heads", "loop"), ("attention", "fa3"), ("mlp", "auto")):
        auto.write_table([entry(name, op)])
        assert chosen(op) == auto.Choice("fused", "default")


def test_where_the_nearest_cannot_run_the_next_does_and_the_reason_is_known(caplog):
    auto.write_table([entry("single", d_model=768), entry("fused", rows=1, d_model=768)])
    caplog.set_level(logging.INFO, "tnp.auto")
    choice = chosen(rows=44_000, d_model=768, d_ff=2048)
    assert (choice.implementation, choice.source) == ("fused", "nearest")
    assert choice.refused == "single cannot run here: it does not take d_model 768"
    (record,) = caplog.records
    assert record.getMessage() == (
        "mlp (rows 44000, d_model 768, d_ff 2048) on cuda in bfloat16: fused, nearest; "
        "single cannot run here: it does not take d_model 768"
    )


def test_pytorch_runs_where_ours_cannot(capability):
    wide = chosen("rms_norm", rows=64, d_model=32_768)
    assert (wide.implementation, wide.source) == ("torch", "default")
    assert wide.refused == "fused cannot run here: it does not take d_model 32768"
    assert chosen(dtype=torch.float64).implementation == "torch"
    capability(7, 5)
    auto.choose.cache_clear()
    auto.write_table([entry("fused", capability=75)])
    assert "compute capability 8.0" in chosen().refused
    assert chosen().implementation == "torch"


def test_limits_are_the_operators_own():
    from tnp.ops import embedding, mixture_nll, rms_norm
    from tnp.ops.mixture_heads import triton_heads
    from tnp.ops.mlp import single

    most = {
        (op, size): taken[-1]
        for (op, _), sizes in registry.LIMITS.items()
        for size, taken in sizes.items()
    }
    assert most == {
        ("attention", "head_dim"): 128,
        ("embedding", "width"): embedding.MAX_WIDTH,
        ("rms_norm", "d_model"): rms_norm.MAX_WIDTH,
        ("mlp", "d_model"): single.MAX_D,
        ("mixture_heads", "n_outputs"): triton_heads.MAX_OUTPUTS.value,
        ("mixture_nll", "n_components"): mixture_nll.MAX_COMPONENTS,
        ("mixture_nll", "d_y"): mixture_nll.MAX_D_Y,
    }
    widths = [d for d in range(1, 2 * single.MAX_D) if single.serves(d)]
    assert widths == list(registry.LIMITS["mlp", "single"]["d_model"])


def test_a_decision_is_logged_once_for_sizes_of_a_power_of_two_and_listed(caplog):
    caplog.set_level(logging.INFO, "tnp.auto")
    for rows in (600, 1000, 1000, 1024):
        chosen("rms_norm", rows=rows, d_model=512)
    chosen("rms_norm", rows=1025, d_model=512)
    assert len(caplog.records) == 2
    first, _ = auto.choices()
    assert first == {
        "op": "rms_norm",
        "device": "cuda",
        "dtype": "bfloat16",
        "up_to": {"rows": 1024, "d_model": 512},
        "implementation": "fused",
        "source": "default",
        "refused": "",
    }


def test_a_decision_is_described_with_what_it_launches():
    choice = auto.Choice("fused", "nearest")
    assert json.loads(choice.describe()) == {"implementation": "fused", "source": "nearest"}
    assert json.loads(choice.describe('{"kernel": "hopper"}'))["launch"] == {"kernel": "hopper"}


def test_the_first_candidate_within_one_percent_of_the_fastest_is_entered():
    assert auto.fastest("mlp", {"torch": 1.01, "single": 2.0, "fused": 1.0}) == "torch"
    assert auto.fastest("mlp", {"torch": 1.02, "single": 2.0, "fused": 1.0}) == "fused"
    assert auto.fastest("mlp", {"fused": 1.0}) == "fused"
    assert auto.training_ms("mlp", forward=1.0, backward=2.0) == 3.0
    assert auto.training_ms("mixture_nll", forward=1.0, backward=2.0) == 2.0


def test_a_new_entry_takes_the_place_of_the_old_one():
    auto.write_table([entry("torch"), entry("torch", rows=5), entry("fused")])
    assert [e["implementation"] for e in auto.table()] == ["fused", "torch"]
    assert auto.TABLE.read_text().count("\n") == 4


def test_a_table_that_cannot_be_written_stays_as_it_was(monkeypatch):
    auto.write_table([entry("torch")])
    before = auto.TABLE.read_text()

    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError, match="no space"):
        auto.write_table([])
    assert auto.TABLE.read_text() == before


def test_the_sizes_of_a_benchmark_are_those_of_a_call(monkeypatch):
    asked = []

    def choose(*problem):
        asked.append(problem)
        return auto.Choice("torch", "default")

    monkeypatch.setattr(auto, "choose", choose)
    x = torch.randn(2, 5, 32)
    up, down = torch.randn(48, 32), torch.randn(32, 48)
    mlp(x, up, down, implementation="auto")
    mixture_heads(x, up.expand(3, -1, -1), down[:3].expand(3, -1, -1), implementation="auto")
    parameters = torch.randn(2, 5, 3, 3)
    mixture_nll(parameters.bfloat16(), torch.randn(2, 5, 1), implementation="auto")
    row = {"batch": 2, "n_q": 5, "d_model": 32, "d_ff_storage": 48, "dtype": "float32"}
    columns = {
        "mlp": ("d_model", "d_ff_storage"),
        "mixture_heads": ("d_model", "d_ff_storage", "n_components"),
        "mixture_nll": ("n_components",),
    }
    for (op, device, dtype, sizes, unserved), known in zip(asked, columns.items(), strict=True):
        assert (op, device, dtype, unserved) == (known[0], CPU, torch.float32, "")
        of_op = {name: (row | {"n_components": 3})[name] for name in known[1]}
        of_row = auto.sizes_of({"op": op, "batch": 2, "n_q": 5} | of_op)
        assert of_row.items() <= dict(sizes).items()
        assert set(dict(sizes)) - set(of_row) <= {"n_outputs", "d_y"}


def test_every_committed_entry_is_a_candidate(monkeypatch):
    monkeypatch.undo()
    auto.table.cache_clear()
    for known in auto.table():
        assert known["implementation"] in registry.CANDIDATES[known["op"]], known


def test_what_may_choose_waits_for_the_gates_of_every_candidate():
    assert gates_for({"mlp": "auto"}) == ["baseline", "mlp", "kernels"]
    attention_gates = gates_for({"attention": "auto"})
    for name in registry.CANDIDATES["attention"]:
        assert set(KERNEL_GATES.get(("attention", name), ())) <= set(attention_gates)
    red = {"gate": "mlp", "implementation": "single", "status": "ok", "passed": False}
    red |= {"check": "far", "metric": "error", "value": 3.0, "bound": 1.0}
    assert blocking_reason([red], {"mlp": "auto"}) is not None
    assert blocking_reason([red], {"mlp": "fused"}) is None
    red |= {"gate": "mixture_heads", "implementation": "loop"}
    assert blocking_reason([red], {"mixture_heads": "auto"}) is None


def calls():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 32), torch.rand(32)
    up, down = torch.randn(48, 32), torch.randn(32, 48)
    heads = torch.randn(3, 48, 32), torch.randn(3, 3, 48)
    q, k, y = torch.randn(2, 2, 7, 16), torch.randn(2, 2, 5, 16), torch.randn(2, 5, 1)
    return {
        "attention": (attention, (q, k, k)),
        "embedding": (embed_rows, (y, y, y, torch.randn(32, 3), torch.float32)),
        "rms_norm": (rms_norm, (x, weight)),
        "add_rms_norm": (add_rms_norm, (x, x, weight)),
        "mlp": (mlp, (x, up, down)),
        "mixture_heads": (mixture_heads, (x, *heads)),
        "mixture_nll": (mixture_nll, (torch.randn(2, 5, 3, 3), y)),
    }


@pytest.mark.parametrize("name", calls())
def test_it_computes_what_it_chose_compiled_too(name):
    compute, arguments = calls()[name]
    expected = compute(*arguments)
    assert auto_equals(compute(*arguments, implementation="auto"), expected)
    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(compute, fullgraph=True, backend="eager", dynamic=dynamic)
        assert auto_equals(compiled(*arguments, implementation="auto"), expected)


def auto_equals(found, expected) -> bool:
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    return all(torch.equal(one, other) for one, other in pairs)


def test_bad_input_is_refused_as_everywhere():
    with pytest.raises(ValueError, match="must be"):
        mlp(torch.randn(3), torch.randn(4), torch.randn(4, 4), implementation="auto")
    with pytest.raises(ValueError, match="must be"):
        rms_norm(torch.tensor(1.0), torch.ones(3), implementation="auto")


def test_what_only_pytorch_takes_it_gets(monkeypatch):
    monkeypatch.setattr(auto, "_choose", lambda *_: auto.Choice("fused", "tuned"))
    auto.choose.cache_clear()
    y = torch.randn(2, 5, 1)
    tokens, double = torch.randn(32, 3), y.double()
    for arguments in (
        (y, y, y, torch.randn(3, 32).T, torch.float32),
        (double, y, double, tokens, torch.float32),
        (y, double, y, tokens, torch.float32),
        (None, None, double, tokens, torch.float32),
    ):
        assert torch.equal(embed_rows(*arguments, implementation="auto"), embed_rows(*arguments))
    parameters = torch.randn(2, 5, 3, 3), double
    assert torch.equal(mixture_nll(*parameters, implementation="auto"), mixture_nll(*parameters))
    differentiable = y.clone().requires_grad_()
    rows = embed_rows(
        y, y, differentiable, torch.randn(32, 3), torch.float32, implementation="auto"
    )
    rows.sum().backward()
    assert differentiable.grad is not None
    reasons = {choice["op"]: choice["refused"] for choice in auto.choices()}
    assert reasons["embedding"].startswith("x or y wants a gradient")
    assert reasons["mixture_nll"] == "y is torch.float64"
    auto.choose.cache_clear()


def test_padded_keys_are_for_ours():
    q = torch.randn(2, 2, 7, 16)
    lengths = torch.tensor([3, 7], dtype=torch.int32)
    padded = attention(q, q, q, n_keys=lengths, implementation="auto")
    assert torch.equal(padded, attention(q, q, q, n_keys=lengths, implementation="fused"))
