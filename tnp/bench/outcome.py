"""Makes the rows of a measurement, also of a failed one: with a status and a reason."""

from collections.abc import Iterable

from tnp.bench import evidence
from tnp.dispatch.registry import catalog
from tnp.dispatch.spec import Problem
from tnp.experiment.failures import one_line
from tnp.store.schemas import (
    CONTRACT,
    GENERATION_KEY,
    HOST_STEP_KEY,
    OP_KEY,
    OP_SIZES,
    PREDICTION_KEY,
    PROFILE_KEY,
    STEP_KEY,
    VARIANT,
)

Rows = dict[str, list[dict[str, object]]]  # table → its rows

SEPARATOR = "--"  # between an implementation and the part that tells its contenders apart
_TWIN = f"{SEPARATOR}twin"
_KEYS = {
    "step": [name for name, _ in STEP_KEY + VARIANT],
    "stage": [name for name, _ in STEP_KEY],
    "op": [*(name for name, _ in OP_KEY + OP_SIZES + CONTRACT), "twin"],
}

# Ways to predict, each with its own row: see `tnp.bench.predictions`.
FORMS = ("anew", "encode", "kept", "replayed", "bare")
# The study of joint samples, and its forms: see `tnp.bench.joint`.
JOINT, JOINT_FORMS = "joint", ("drawn", "drawn_anew", "trained", "trained_plain")


def key(kind: str, parameters: dict) -> dict[str, object]:
    """Returns the columns of a "step", "stage" or "op" row that are known before measuring.

    Columns that do not apply are None.
    """
    row = {name: parameters.get(name) for name in _KEYS[kind]}
    if kind == "stage":
        return row
    return row | (evidence.of_step(parameters) if kind == "step" else evidence.of_op(parameters))


def op_job(
    problem: Problem, contenders: Iterable[str], config_id: str, draw: dict, **others: object
) -> dict:
    """Returns an operator's benchmark, the parameters of `tnp.bench.isolate.run_isolated`.

    Args:
        problem: the problem to compute.
        contenders: implementations, "auto" too; twins and trials are called
            "implementation--anything".
        config_id: the job's id; a row's config_id is this one and the contender.
        draw: how values are drawn.
        others: `device` ("cuda" or "cpu") and `device_slug`, the name in rows; `replicate`;
            `timing`, the fields of a policy; columns of its rows, such as `shape`; `passes`, if not
            all passes are timed; and `forced`: {contender: kernels and configurations by
            operation}, as `tnp.bench.contenders.trials` gives them. {} for an implementation asks
            the measuring process to list all its trials.
    """
    return {
        "config_id": config_id,
        "op": problem.op,
        "problem": problem.json,
        "draw": draw,
        "dtype": problem.dtype,
        "implementations": {name: f"{config_id}{SEPARATOR}{name}" for name in contenders},
        **others,
    }


def passes(parameters: dict) -> tuple[str, ...]:
    """Returns the passes that an operator's job names, else all that the operator has."""
    if "passes" in parameters:
        return tuple(parameters["passes"])
    trained = "problem" in parameters and catalog().operator(parameters["op"]).differentiated
    return ("forward", "backward") if trained else ("forward",)


def only(parameters: dict, contenders: Iterable[str]) -> dict:
    """Returns an operator's job with some of its contenders."""
    chosen = {name: parameters["implementations"][name] for name in contenders}
    return parameters | {"implementations": chosen}


def of_contender(parameters: dict, contender: str) -> dict:
    """Returns the parameters of one contender's rows, from its operator's job."""
    return parameters | {
        "implementation": implementation_of(contender),
        "twin": _TWIN in contender,
        "forced": parameters.get("forced", {}).get(contender),
        "config_id": parameters["implementations"][contender],
    }


def of_form(parameters: dict, form: str) -> dict[str, object]:
    """Returns the columns of a row of predictions that are known before measuring."""
    about = parameters | {"form": form}
    about["config_id"] += f"{SEPARATOR}{form}"
    known = {name: about[name] for name, _ in PREDICTION_KEY + VARIANT}
    return known | evidence.of_prediction(parameters)


def of_generation(parameters: dict, form: str) -> dict[str, object]:
    """Returns the columns of a row of `generations` that are known before measuring."""
    about = parameters | {"form": form}
    about["config_id"] += f"{SEPARATOR}{form}"
    known = {name: about[name] for name, _ in GENERATION_KEY}
    return known | evidence.of_generation(about)


def of_profile(parameters: dict, pass_: str) -> dict[str, object]:
    """Returns the columns of a row of profiles that are known before profiling."""
    whole = catalog().operator(parameters["op"]).backward_with_forward and pass_ == "backward"
    about = parameters | {"pass": pass_, "with_forward": whole}
    return {name: about[name] for name, _ in PROFILE_KEY}


def of_step_form(parameters: dict, form: dict) -> dict[str, object]:
    """Returns the columns of a row of `host_steps` that are known before measuring."""
    about = parameters | form | {"checkpoint": False, "optimizer": True}
    known = {name: about[name] for name, _ in HOST_STEP_KEY}
    evidence_of = evidence.of_step(about)
    return known | {name: evidence_of[name] for name in ("spec_hash", "role")}


def twins(implementation: str, n: int) -> list[str]:
    """Returns names of `n` more contenders of one implementation, which differ by noise alone."""
    return [f"{implementation}{_TWIN}{i}" for i in range(1, n + 1)]


def implementation_of(contender: str) -> str:
    """Returns the implementation's name in the name of a twin or a trial."""
    return contender.partition(SEPARATOR)[0]


def failure_rows(kind: str, parameters: dict, status: str, reason: str) -> Rows:
    """Returns rows that say why nothing was measured.

    A step has one row, an operator one for each implementation and pass. Predictions, language
    models and the host's steps have one for each form, the host's calls one for each
    implementation.
    """
    outcome = {"status": status, "reason": one_line(reason)}
    if kind == "step":
        return {"steps": [key(kind, parameters) | outcome]}
    if kind == "prediction":
        forms = JOINT_FORMS if parameters["study"] == JOINT else FORMS
        return {"predictions": [of_form(parameters, form) | outcome for form in forms]}
    if kind == "generation":
        rows = [of_generation(parameters, form) | outcome for form in parameters["forms"]]
        return {"generations": rows}
    if kind == "profile":
        rows = [of_profile(parameters, pass_) | outcome for pass_ in passes(parameters)]
        return {"profiles": rows}
    if kind == "host_step":
        return {"host_steps": [of_step_form(parameters, f) | outcome for f in parameters["forms"]]}
    if kind == "host":
        return {
            "host_calls": [
                {"op": asked["op"], "problem": asked["problem"], "implementation": name} | outcome
                for asked in parameters["problems"]
                for name in asked["implementations"]
            ]
        }
    return {
        "ops": [
            key(kind, of_contender(parameters, contender)) | {"pass": pass_} | outcome
            for contender in parameters["implementations"]
            for pass_ in passes(parameters)
        ]
    }


def together(parts: Iterable[Rows]) -> Rows:
    """Returns all rows of `parts`, table by table."""
    tables: Rows = {}
    for part in parts:
        for table, rows in part.items():
            tables.setdefault(table, []).extend(rows)
    return tables
