"""Tests that tuning trials are rows of operators that no figure and no comparison sees."""

import json
from collections.abc import Callable

from tests.sql.conftest import Query, operator

VIEWS = ("summaries", "current_ops", "operator_training", "operator_speedup", "roofline")
TRIAL = json.dumps({"attention.forward": ["hopper", {}]})
# Trial "{}" could not be listed. A time that is forced nowhere is of an ordinary implementation.
FORCED = {"trial": (TRIAL, 0.51), "unlisted": ("{}", 0.52), "plain": (None, 0.53)}


def test_views_of_operators_leave_trials_out(store: Callable[..., Query]) -> None:
    rows = [
        operator("fused", config_id=name, shape=name, time_ms_p50=ms, forced=forced)
        for name, (forced, ms) in FORCED.items()
    ]
    query = store(operator("sdpa_flash", time_ms_p50=2.0), *rows)
    seen = {name: set() for name in FORCED}
    for view in VIEWS:
        content = json.dumps(query(f"from {view}"), default=str)
        for name in FORCED:
            if f'"{name}"' in content or f' {name}"' in content:
                seen[name].add(view)
    assert seen["trial"] == seen["unlisted"] == set()
    assert seen["plain"] == set(VIEWS)
