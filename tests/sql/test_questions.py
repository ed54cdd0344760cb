"""The ready questions answer over rows made for them."""

from collections.abc import Callable
from pathlib import Path

from tests.sql.conftest import Query, check, gate, operator, run, step

QUESTIONS = Path(__file__).parents[2] / "workflow" / "questions"


def asked(query: Query, question: str) -> list[dict]:
    return query((QUESTIONS / f"{question}.sql").read_text())


def test_two_devices_are_compared_where_both_have_evidence(store: Callable[..., Query]) -> None:
    elsewhere = {  # what the H100's run of a variant has otherwise than the H200's
        "good": {},
        "unsettled": {"settled": False},
        "older": {"torch": "2.11.0"},
        "larger": {"spec_hash": "of another model"},
    }

    def steps_of(device: str, factor: float, others: dict[str, dict]) -> list[dict]:
        proof = check("proof", "far", 0.5, 1.0, passed=True, device=device)
        versions = {columns.get("torch", "2.13.0") for columns in others.values()}
        return [run(f"gate {device} {torch}", proof, torch=torch) for torch in versions] + [
            run(f"{variant} {device}", step(variant, [factor * 10.0], device=device), **columns)
            for variant, columns in others.items()
        ]

    query = store(
        *steps_of("nvidia-h100", 1.5, elsewhere),
        *steps_of("nvidia-h200", 1.0, dict.fromkeys(elsewhere, {})),
    )
    counting = query("from step_summary where valid")
    assert len(counting) == 7  # all but the one that was not precise enough
    (row,) = asked(query, "h100_against_h200")
    assert (row["variant"], row["torch"]) == ("good", "2.13.0")
    assert (row["h100_ms"], row["h200_ms"], row["h200_is_times_as_fast"]) == (15.0, 10.0, 1.5)


def test_throttled_samples_are_those_below_the_highest_clock(store: Callable[..., Query]) -> None:
    capped = {"throttle_reasons": "sw_power_cap", "throttled": False, "n_samples": 4}
    parts = [
        run("capped", step("capped", [1.0] * 4, **capped)),
        run("idle", step("idle", [1.0] * 4, throttle_reasons="", throttled=False)),
    ]
    for part in parts:
        for row, clock in zip(part["samples"], (1980.0, 1500.0, 1980.0, 1700.0), strict=True):
            row["sm_clock_mhz"] = clock
    (row,) = asked(store(*parts), "throttled_samples")
    assert row["config_id"] == "mid--capped" and row["reasons"] == "sw_power_cap"
    assert (row["n_samples"], row["n_lowered"]) == (4, 2)
    assert (row["first_sample"], row["last_sample"]) == (1, 3)
    assert (row["lowest_mhz"], row["top_mhz"]) == (1500, 1980)


def test_pytorchs_time_has_code_and_no_gate(store: Callable[..., Query]) -> None:
    timed = [operator(name, time_ms_p50=1.0) for name in ("sdpa_flash", "fused")]
    for part, name in zip(timed, ("sdpa_flash", "fused"), strict=True):
        for rows in part.values():
            rows[0]["config_id"] = f"attention--small--{name}"
    theirs, ours = asked(
        store(gate("proof"), run("theirs", timed[0]), run("ours", timed[1])), "evidence_of_a_time"
    )[::-1]
    assert theirs["config_id"] == "attention--small--sdpa_flash" and theirs["valid"]
    assert (theirs["gates"], ours["gates"]) == (None, ["proof true proof"])
    assert theirs["code_sets"] == ours["code_sets"] and len(ours["code_sets"]) == 1


def test_energy_of_what_does_not_count_is_left_out(store: Callable[..., Query]) -> None:
    parts = [
        run(name, step(name, [10.0], energy_j=5.0), settled=name == "settled")
        for name in ("settled", "unsettled")
    ]
    (row,) = asked(store(gate("proof"), *parts), "energy")
    assert (row["variant"], row["mean_power_w"], row["valid"]) == ("settled", 500, True)
