"""Runs one gate in a process of its own and records its checks, red ones too."""

from pathlib import Path

from tnp.bench.isolate import with_provenance
from tnp.bench.process import device_lock
from tnp.gates import NOT_FINISHED
from workflow import sources
from workflow.gate_process import run
from workflow.jobs import job, write

params = snakemake.params
gate = snakemake.wildcards.gate


def verdict(rows: list[dict]) -> str:
    left_out = [row for row in rows if row["status"] == "unsupported"]
    ended = [row for row in rows if row["status"] not in ("ok", "unsupported")]
    red = [row for row in rows if row["status"] == "ok" and not row["passed"]]
    if red:
        worst = red[0]
        return (
            f"RED, {len(red)} of {len(rows)} checks: {worst['check']}: {worst['metric']} "
            f"{worst['value']:.3g}, bound {worst['bound']:.3g}"
        )
    if ended:
        kind = "not finished" if ended[0]["status"] in NOT_FINISHED else ended[0]["status"]
        return f"{kind}: {ended[0]['reason']}"
    if len(left_out) == len(rows):
        return f"not for this device: {left_out[0]['reason']}"
    said = f"green, {len(rows) - len(left_out)} checks"
    if left_out:
        said += f", {len(left_out)} cases left out: {left_out[0]['reason']}"
    return said


with job(f"gate {gate}", snakemake.log[0], params.part) as say:
    with device_lock(params.slug, shared=True, say=say):
        definitions = sources.code(sources.of_gate(gate))
        of = gate, params.device, params.slug, definitions, params.timeout_s
        tables = run(*of, Path(params.unfinished), say, params.shares)
    identity = next((row["environment_id"] for row in tables["environments"]), None)
    write(snakemake.output, with_provenance(tables, params.slug, identity))
    say(verdict(tables["gates"]))
