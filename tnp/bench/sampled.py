"""Makes the columns that say how a row was timed, and the rows of raw samples."""

from tnp.bench.provenance import Conditions
from tnp.bench.timing import Measurement


def measured_columns(measurement: Measurement, conditions: Conditions) -> dict[str, object]:
    """Returns the columns of a timed row that say how it was timed."""
    return {
        "n_samples": len(measurement.samples_ms),
        "n_warmup": measurement.n_warmup,
        "measure_s": measurement.measure_s,
        "settled": measurement.settled,
    } | conditions.row()


def sample_rows(
    parameters: dict, pass_: str, measurement: Measurement, conditions: Conditions
) -> list[dict[str, object]]:
    """Returns rows of table "samples": every raw timing, in the order taken."""
    configuration = {name: parameters[name] for name in ("config_id", "replicate")}
    timed = zip(measurement.samples_ms, measurement.ended_s, strict=True)
    return [
        configuration
        | {"pass": pass_, "sample": sample, "time_ms": time_ms, "t_s": ended_s}
        | {"sm_clock_mhz": conditions.sm_clock_mhz(measurement.began + ended_s)}
        | {"n_launches": measurement.n_launches}
        for sample, (time_ms, ended_s) in enumerate(timed)
    ]
