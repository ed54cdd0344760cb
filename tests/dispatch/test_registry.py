"""Tests names of implementations, and operators of other packages that are taken or refused."""

import importlib
import inspect
import pkgutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import tnp.ops
from tnp.dispatch import registry
from tnp.dispatch.spec import OWN
from tnp.model.variants import FAMILIES, Variant
from tnp.ops.attention import attention
from tnp.ops.swiglu import OPERATOR

THEIRS = replace(OPERATOR, name="theirs")


@pytest.fixture
def brought(monkeypatch):
    """A catalog where package "pytest" brings an operator that is loaded so."""

    def bring(load):
        dist = SimpleNamespace(name="pytest")
        entry = SimpleNamespace(name="theirs", dist=dist, module="theirs", load=load)
        groups = {registry.OPERATORS: [entry], registry.IMPLEMENTATIONS: []}
        monkeypatch.setattr(registry.metadata, "entry_points", lambda group: groups[group])
        return registry.Catalog()

    return bring


def test_kernels_of_somebody_elses_operator_are_theirs_and_its_version_stands_in_rows(brought):
    known = brought(lambda: THEIRS)
    assert known.faults == []
    assert known.listed("theirs", "triton").provider == "pytest"
    assert known.listed("theirs", "triton").packages == {"pytest": pytest.__version__}
    assert known.role("theirs", "triton") == "peer"
    assert known.role("theirs", "torch") == "baseline"


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (lambda: 5, "it is no Operator"),
        (lambda: OPERATOR, "there is an operator 'swiglu' already"),
        (lambda: replace(THEIRS, implementations=OPERATOR.implementations * 2), "called 'torch'"),
        (lambda: sys.exit("I need a GPU"), "SystemExit: I need a GPU"),
        (lambda: 1 // 0, "ZeroDivisionError"),
    ],
)
def test_what_cannot_be_taken_is_one_sentence_and_the_rest_goes_on(brought, load, said):
    known = brought(load)
    (fault,) = known.faults
    assert fault.startswith("operator 'theirs' of pytest: ") and said in fault
    assert known.names("swiglu") == [one.name for one in OPERATOR.implementations]


@pytest.mark.parametrize("op", list(registry.catalog().operators))
def test_every_operator_takes_torch_and_own(op):
    known = registry.catalog()
    plain, ours = (known.listed(op, name) for name in (registry.TORCH, OWN))
    assert plain.provider == "torch" and plain.rank == 0
    assert ours.provider == OWN and ours.own.differentiable == plain.own.differentiable
    assert {plain.name, ours.name} <= set(known.names(op))


def test_rows_and_sentences_say_what_an_implementation_is_really_called():
    variant = Variant("", **dict.fromkeys(FAMILIES, OWN))
    assert set(variant.implementations().values()) == {"fused"}
    assert Variant("", attention="torch") == Variant("")
    q = torch.randn(1, 2, 5, 16)
    for name, real in (("torch", "sdpa_flash"), (OWN, "fused")):
        o, expected = (attention(q, q, q, implementation=one) for one in (name, real))
        assert torch.equal(o, expected)
        compiled = torch.compile(attention, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(q, q, q, implementation=name), expected)
    with pytest.raises(RuntimeError, match="'sdpa_flash' .* lse=True: choose .*fused or .*refer"):
        attention(q, q, q, lse=True, implementation="torch")
    with pytest.raises(ValueError, match="unknown implementation 'owm' .*reference, .*torch, own"):
        attention(q, q, q, implementation="owm")


def test_each_package_of_operators_lists_its_public_functions():
    for module in pkgutil.iter_modules(tnp.ops.__path__, "tnp.ops."):
        package = importlib.import_module(module.name)
        functions = {
            name
            for name, function in vars(package).items()
            if inspect.isfunction(function)
            and "implementation" in inspect.signature(function).parameters
        }
        if package is tnp.ops.rope:
            functions.add("rotary_tables")  # makes inputs
        assert functions == set(getattr(package, "__all__", ())), module.name
