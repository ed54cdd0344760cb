"""Tests the view of profiles: a pass's dominant kernel and totals, against values by hand."""

from datetime import timedelta

import pytest

from tests.sql.conftest import NOW, PROVENANCE, Store, Tables, one

PROBLEM = '{"dtype":"bfloat16","op":"swiglu","sizes":{"rows":64,"width":256}}'


def profiled(run_id: str, *kernels: dict, minutes: float = 0, **columns: object) -> Tables:
    """One run of a pass, a row a kernel."""
    about = PROVENANCE | {"op": "swiglu", "problem": PROBLEM, "shape": "tiny", "status": "ok"}
    about |= {"implementation": "triton", "pass": "forward", "sections": "full", "run_id": run_id}
    about |= {"recorded_at": NOW + timedelta(minutes=minutes), "config_id": "profiles--swiglu"}
    return {"profiles": [about | {"launch": n} | k | columns for n, k in enumerate(kernels)]}


def kernel(name: str, us: float, **columns: object) -> dict:
    return {"kernel": name, "duration_us": us, **columns}


def test_the_dominant_kernel_stands_for_a_pass_of_several(store: Store) -> None:
    kernels = (kernel("fill", 1.0, sm_percent=2.0, registers=16, stall_1="wait"),
               kernel("product", 6.0, sm_percent=80.0, registers=168, stall_1="barrier"),
               kernel("fill", 1.0, sm_percent=3.0, registers=16))  # fmt: skip
    row = one(store(profiled("one", *kernels)), "from profiled_passes")
    assert (row["kernel"], row["n_kernels"], row["duration_us"]) == ("product", 3, 8.0)
    assert row["dominant_share"] == 0.75 and row["own"]
    assert (row["sm_percent"], row["registers"], row["stall_1"]) == (80.0, 168, "barrier")


def test_what_the_dominant_kernel_lacks_is_taken_from_no_other(store: Store) -> None:
    kernels = (kernel("small", 1.0, l2_hit_percent=99.0), kernel("large", 2.0))
    row = one(store(profiled("one", *kernels)), "from profiled_passes")
    assert row["kernel"] == "large" and row["l2_hit_percent"] is None


def test_the_newest_profile_takes_the_place_of_an_older_one(store: Store) -> None:
    query = store(profiled("old", kernel("a", 5.0), kernel("b", 5.0)),
                  profiled("new", kernel("c", 4.0), minutes=1))  # fmt: skip
    row = one(query, "from profiled_passes")
    assert (row["kernel"], row["n_kernels"], row["duration_us"]) == ("c", 1, 4.0)


def test_a_failure_hides_no_profile_and_is_shown_where_there_is_none(store: Store) -> None:
    failed = {"status": "unsupported", "reason": "no counters", "launch": None}
    parts = (profiled("good", kernel("a", 5.0)), profiled("bad", {}, minutes=1, **failed),
             profiled("worse", {}, **failed | {"pass": "backward"}))  # fmt: skip
    forward, backward = store(*parts)("from profiled_passes order by pass desc")
    assert (forward["status"], forward["kernel"]) == ("ok", "a")
    assert (backward["status"], backward["reason"]) == ("unsupported", "no counters")
    assert backward["n_kernels"] == 0 and backward["duration_us"] is None


@pytest.mark.parametrize("column", ["device", "problem", "implementation", "pass"])
def test_passes_are_told_apart(store: Store, column: str) -> None:
    parts = profiled("one", kernel("a", 5.0)), profiled("two", kernel("a", 5.0), **{column: "x"})
    assert len(store(*parts)("from profiled_passes")) == 2
