"""Tuning trials are rows of operators that no figure and no comparison sees."""

import json
from collections.abc import Callable

from tests.sql.conftest import Query, Row, operator

VIEWS = ("timed", "judged_ops", "current_ops", "contenders", "comparisons", "operator_training",
         "operator_speedup", "roofline")  # fmt: skip


def test_views_of_operators_leave_trials_out(store: Callable[..., Query]) -> None:
    def seen(forced: dict | None) -> dict[str, list[Row]]:
        """Rows of a contender beside the usual ones, by view."""
        usual = [operator("sdpa_flash", time_ms_p50=2.0), operator("fused", time_ms_p50=1.0)]
        content = None if forced is None else json.dumps(forced)
        trial = operator("fused", config_id="trial", time_ms_p50=0.5, forced=content)
        query = store(*usual, trial)
        return {view: query(f"from {view}") for view in VIEWS}

    def found(views: dict[str, list[Row]]) -> set[str]:
        """Views in which its name or its time stands."""
        return {
            view
            for view, rows in views.items()
            if any({"trial", 0.5, 0.75} & {x for x in row.values() if isinstance(x, (str, float))}
                   for row in rows)
        }  # fmt: skip

    assert found(seen({"attention.forward": ["hopper", {}]})) == set()
    assert found(seen({})) == set()  # of which no trial could be listed
    assert {"judged_ops", "current_ops", "roofline", "operator_speedup"} <= found(seen(None))
