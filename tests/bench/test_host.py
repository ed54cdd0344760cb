"""What a call costs the host: who is called, how, and what its rows say. No test asserts a time."""

import pytest

from tnp import dispatch
from tnp.bench import host
from tnp.catalog import catalog


@pytest.fixture
def measured(monkeypatch) -> tuple[list[dict], set[str]]:
    """Rows of two operators on the CPU, and the names that went through dispatch."""
    for name, small in {"CALLS": 1, "CHAIN": 2, "WARM_ROUNDS": 0, "ROUNDS": 2}.items():
        monkeypatch.setattr(host, name, small)
    monkeypatch.setattr(host, "synchronize", lambda device: None)
    dispatched, call = set(), dispatch.call

    def noted(operator, implementation, *rest):
        dispatched.add(f"{operator.name} {implementation}")
        return call(operator, implementation, *rest)

    monkeypatch.setattr(dispatch, "call", noted)
    problems = [
        {"op": op, "problem": catalog().operator(op).problem("float32", **sizes).json, **asked}
        for op, sizes, asked in (
            ("add_rms_norm", {"rows": 4, "width": 64}, {"implementations": ["torch", "fused"]}),
            (
                "attention",
                {"batch": 1, "n_heads": 2, "n_q": 5, "n_k": 3, "head_dim": 16},
                {"implementations": ["sdpa_cudnn", "fused", "auto"]},
            ),
        )
    ]
    return host.measure_host({"device": "cpu", "problems": problems}), dispatched


def test_rows_are_of_every_pass_and_implementation(measured):
    rows, _ = measured
    found = {(row["op"], row["pass"], row["implementation"]): row for row in rows}
    assert len(found) == len(rows) == len(host.PASSES) * (3 + 4)
    for (op, _, name), row in found.items():
        assert row["with_launches"] is False
        if name == "sdpa_cudnn":
            assert row["status"] == "unsupported" and "needs a CUDA device" in row["reason"]
        else:
            assert row["status"] == "ok" and row["n_samples"] == 2, (op, name, row)
            assert row["host_us_p50"] is not None


def test_forms_of_pytorch_are_called_as_they_are(measured):
    _, dispatched = measured
    assert dispatched == {"add_rms_norm fused", "attention fused", "attention auto"}
