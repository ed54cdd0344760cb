"""Tests that ours is ours in every view and figure, whatever its name and operator."""

import json
from collections.abc import Callable
from itertools import product

import pytest

from tests.sql.conftest import Query, operator
from tnp.dispatch import registry
from tnp.dispatch.spec import Implementation, triton_from
from tnp.figures import data

NAME = "warp9"


def timed(op: str, **columns) -> list:
    """Three contenders of an operator, forward and backward: PyTorch's, a peer, and ours."""
    baseline = registry.catalog().names(op)[0]
    contenders = ((baseline, "baseline", "torch", 4.0), ("elsewhere", "peer", "other", 3.0),
                  (NAME, "own", "own", 2.0))  # fmt: skip
    return [
        operator(
            name,
            op,
            **{"pass": pass_, "role": role, "provider": provider, "time_ms_p50": time},
            config_id=f"{op}--{name}",
            problem=json.dumps({"op": op}),
            batch=1,
            n_q=64,
            bytes=1e9,
            **columns,
        )
        for (name, role, provider, time), pass_ in product(contenders, ("forward", "backward"))
    ]


@pytest.fixture
def with_ours(monkeypatch):
    """Every operator of the catalog has an implementation of ours of that name."""
    right = registry.Catalog._add

    def add(self, operator, brought_by=None):
        right(self, operator, brought_by)
        own = Implementation(NAME, run=operator.reference, supported=triton_from(80))
        rank = len(operator.implementations)
        listed = registry.Listed(operator.name, NAME, rank, own)
        self._listed[operator.name, NAME] = listed

    monkeypatch.setattr(registry.Catalog, "_add", add)
    registry.catalog.cache_clear()
    yield
    monkeypatch.undo()
    registry.catalog.cache_clear()


def test_any_name_of_ours_is_ours_everywhere(with_ours, store: Callable[..., Query]) -> None:
    operators = list(registry.catalog().operators)
    assert "attention" in operators and len(operators) > 10
    query = store(*(part for op in operators for part in timed(op)))

    known = {(row["op"], row["provider"], row["chosen_from"])
             for row in query(f"from implementations where implementation = '{NAME}'")}  # fmt: skip
    assert known == {(op, "own", True) for op in operators}

    both = {(op, pass_) for op in operators for pass_ in ("forward", "backward")}
    for view in ("roofline", "operator_speedup"):
        rows = query(f"from {view}")
        assert {(row["op"], row["pass"]) for row in rows if row["own"]} == both
        assert {row["implementation"] for row in rows if row["own"]} == {NAME}
        assert {row["role"] for row in rows if row["implementation"] == NAME} == {"own"}
    speedups = query("from operator_speedup where own")
    assert {row["best_peer_implementation"] for row in speedups} == {"elsewhere"}
    for row in speedups:
        assert (row["speedup"], row["speedup_best"]) == (pytest.approx(2), pytest.approx(1.5))
    own = query("from own_operators")
    assert {(row["op"], row["pass"]) for row in own} == both
    assert {row["implementation"] for row in own} == {NAME}
    assert not any(NAME in row["others"] for row in own)

    roles = data.roles(query.connection)
    colors = data.variant_colors(query.connection).to_dict()
    named = data.words(NAME)
    assert roles[named] == "own" and "peer" in roles.values()
    of_name = dict(zip(colors["domain"], colors["range"], strict=True))
    assert of_name[named] in data.OWN_COLORS
    assert all(color not in data.OWN_COLORS for name, color in of_name.items() if name != named)
