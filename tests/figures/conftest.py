"""A small database with exactly the columns that the figures read from each view."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import altair as alt
import duckdb
import pytest
import vl_convert

from tests.figures.views import CELLS, VIEWS
from tnp.figures import draw

Row = dict[str, Any]
Build = Callable[..., Path]
Drawn = Callable[..., alt.TopLevelMixin]

WORDS = Path(__file__).parents[2] / "workflow" / "sql" / "words.sql"
GPU, CPU = "nvidia-h200", "cpu"
SIZES = {"small": (64, 64, 500), "mid": (4, 10000, 1000)}
IN_A_CELL = ("step_ms", "tokens_per_s", "speedup", "valid", "fastest", "winner")
THREE = {("mid", "sdpa_flash"): 200.0, ("mid", "sdpa_cudnn"): 150.0, ("mid", "fused"): 100.0}


def write(path: Path, **tables: list[Row]) -> Path:
    """Writes rows by view into a database and returns its path; columns not given are null."""
    path.unlink(missing_ok=True)
    with duckdb.connect(str(path)) as connection:
        connection.begin()  # each row by itself would be written to the disk
        connection.execute(WORDS.read_text())
        for view, columns in VIEWS.items():
            connection.execute(f"create table {view} ({columns})")
            for row in tables.get(view, []):
                names, marks = ", ".join(row), ", ".join("?" * len(row))
                connection.execute(
                    f"insert into {view} ({names}) values ({marks})", list(row.values())
                )
        connection.commit()
    return path


@pytest.fixture
def build(tmp_path: Path) -> Build:
    return partial(write, tmp_path / "results.duckdb")


@pytest.fixture
def drawn(build: Build) -> Drawn:
    """Draws a figure over rows by view, of an H200; `merged` puts parts together."""
    return lambda figure, *parts: draw(figure, build(**merged(H200, *parts)))


def sized(shape: str) -> Row:
    batch, n_context, n_target = SIZES[shape]
    return {"shape": shape, "batch": batch, "n_context": n_context, "n_target": n_target}


# The longest that macro `format_cell` says.
TRAINS = {
    "fp8": "less accurate a step, equal in training in 2 of 4 comparisons",
    "pytorch_best_fp8": "less accurate a step, training not judged here",
}


def steps(
    times: dict[tuple[str, str], float | str],
    device: str = GPU,
    checkpoint: bool = False,
    cuda_graph: bool = False,
    counts: bool | None = True,
) -> dict[str, list[Row]]:
    """Rows of every view over steps from {(shape, variant): milliseconds or status}.

    Intervals are ±1 %, and there is a verdict where they are beyond 1; peak memory is 8 GiB, a
    quarter of it with checkpointing. Without evidence (`counts` is None) there are no intervals.
    """
    tables: dict[str, list[Row]] = {"step_summary": [], "speedup": [], "memory": [], "matrix": []}
    cell = CELLS[checkpoint + 2 * cuda_graph]
    for (shape, variant), time in times.items():
        status = time if isinstance(time, str) else "ok"
        key = {"device": device, "variant": variant}
        switches = {"checkpoint": checkpoint, "cuda_graph": cuda_graph}
        outcome = {"status": status, "reason": "" if status == "ok" else f"because {status}"}
        speedup, memory = {}, None
        if status == "ok":
            here = {name: ms for (at, name), ms in times.items() if at == shape}
            here = {name: ms for name, ms in here.items() if not isinstance(ms, str)}
            baseline = here["sdpa_flash"]
            fastest = min(ms for name, ms in here.items() if name.startswith("sdpa_"))
            speedup = {"baseline_step_ms": baseline, "best_pytorch_step_ms": fastest}
            own = [ms for name, ms in here.items() if role(name) == "own"]
            leads = role(variant) == "own" and time == min(own)
            among_fastest = counts is not False and time <= 1.01 * min(here.values())
            speedup |= {"step_ms": time, "tokens_per_s": 2e6, "valid": counts, "leads": leads}
            speedup |= {"fastest": among_fastest, "winner": among_fastest and leads}
            speedup |= compared("speedup", "verdict", baseline / time, counts)
            speedup |= compared("speedup_best", "verdict_best", fastest / time, counts)
            memory = 2.0 if checkpoint else 8.0
        tables["step_summary"].append(
            key | switches | {"dtype": "bfloat16", "n_runs": 3, "status": status}
        )
        narrow = {"precision": "e4m3" if variant.endswith("fp8") else ""}
        narrow["products_in"] = f"8 bits: {TRAINS[variant]}" if narrow["precision"] else "bfloat16"
        named = key | sized(shape) | switches | outcome | {"role": role(variant)} | narrow
        tables["speedup"].append(named | {"dtype": "bfloat16"} | speedup)
        tables["memory"].append(
            named | {"optimizer": True, "valid": counts, "peak_memory_gib": memory}
        )
        said = {name: speedup.get(name) for name in IN_A_CELL}
        said |= {"peak_memory_gib": memory, "status": status}
        in_cell = {f"{cell}_{name}": value for name, value in said.items()}
        tables["matrix"].append(key | sized(shape) | {"role": role(variant)} | narrow | in_cell)
    return tables


def role(name: str) -> str:
    """Returns the role of a name in these tests."""
    if name in ("sdpa_flash", "torch"):
        return "baseline"
    return "peer" if name.startswith(("sdpa_", "fa", "pytorch_")) else "own"


def compared(name: str, verdict: str, ratio: float, counts: bool | None) -> Row:
    if not counts:
        return {name: None if counts is False else ratio}
    found = "faster" if ratio > 1.02 else "slower" if ratio < 0.98 else "ambiguous"
    return {name: ratio, f"{name}_low": ratio * 0.99, f"{name}_high": ratio * 1.01, verdict: found}


def stage_rows(
    times: dict[tuple[str, str], float],
    device: str = GPU,
    variant: str = "sdpa_flash",
    shape: str = "mid",
    counts: bool | None = True,
    fastest: bool = True,
) -> dict:
    """Returns rows of a step from {(stage, pass): ms}; a tenth of it is between its kernels."""
    total = sum(times.values())
    key = {"device": device, "variant": variant, "dtype": "bfloat16"} | sized(shape)
    key |= {"checkpoint": False, "cuda_graph": True, "role": role(variant)}
    key |= {"valid": counts, "fastest": fastest, "step_ms": total / 0.9, "n_kernels": 7}
    rows = [
        key | {"stage": stage, "pass": pass_, "time_ms": time, "share": time / total}
        for (stage, pass_), time in times.items()
    ]
    return {"stage_share": rows, **step_summary(device, variant)}


def step_summary(device: str, variant: str) -> dict[str, list[Row]]:
    row = {"device": device, "variant": variant, "dtype": "bfloat16", "n_runs": 1}
    return {"step_summary": [row | {"status": "ok"}]}


STDERR = 0.05  # a held-out likelihood's


def training_rows(
    heldout: float,
    shuffled: float,
    exact: float | None = 1.0,
    device: str = GPU,
    run: str = "gp_small",
    study: str = "",
) -> dict[str, list[Row]]:
    """A run of two evaluations that ends at `heldout` and `shuffled`; the prior is at −1."""
    gap_closed = None if exact is None else (heldout + 1) / (exact + 1)
    key = {"device": device, "run": run, "variant": "sdpa_flash", "source": "gaussian_process"}
    key |= {"dtype": "bfloat16", "seed": 0, "study": study, "gap_closed": gap_closed}
    key |= {name: value for name, value in sized("small").items() if name != "shape"}
    key |= {"exact_log_likelihood": exact, "prior_log_likelihood": -1.0}
    rows = []
    for step, value in ((500, heldout - 0.5), (1000, heldout)):
        gained = value - shuffled if value - shuffled > 2 * STDERR else None
        found = {"": value, "_shuffled": shuffled, "_stderr": STDERR}
        rows.append(key | {f"heldout_log_likelihood{name}": x for name, x in found.items()})
        rows[-1] |= {"step": step, "nats_from_context": gained}
    return {"training_curves": rows}


def seed_rows(verdict: str, device: str = GPU, **columns: object) -> dict[str, list[Row]]:
    """Five seeds of `fused`, compared with `separate`."""
    row = {"device": device, "recipe": "{}", "source": "images", "steps": 2000, "products": ""}
    row |= {"last_in_16_bits": 0, "difference_8_bits": 0.001}
    row |= {name: value for name, value in sized("small").items() if name != "shape"}
    row |= {"variant": "fused", "baseline_variant": "separate", "n_seeds": 5, "n_pairs": 5}
    row |= {"mean_difference": 0.001, "difference_low": -0.002, "difference_high": 0.004}
    row |= {"less_accurate": True, "variant_verdict": "equal in training in 1 of 2 comparisons"}
    return {"training_seeds": [row | {"margin": 0.01, "verdict": verdict} | columns]}


def paired_rows(device: str = GPU) -> dict[str, list[Row]]:
    """Run `gp_small` of `training_rows` and one through `separate`, found equivalent to it."""
    key = {"device": device, "variant": "separate", "run": "gp_small_separate"}
    baseline = {"device": device, "run": "gp_small", "variant": "sdpa_flash"}
    losses = [
        run | {"step": step, "loss": loss}
        for run in (baseline, key)
        for step, loss in ((500, 0.4), (1000, 0.2))
    ]
    pair = key | {"baseline_run": "gp_small", "baseline_variant": "sdpa_flash"}
    pair |= {"first_step": 550, "last_step": 1000, "mean_difference": -0.002}
    pair |= {"difference_low": -0.004, "difference_high": 0.001, "margin": 0.01}
    pair |= {"is_null_pair": False}
    return {
        "training_curves": losses,
        "training_differences": [key | {"step": 1000, "difference": -0.002}],
        "training_equivalence": [pair | {"equivalent": True}],
    }


def roofline_rows(
    shares: dict[tuple[str, str], float | str], device: str = GPU
) -> dict[str, list[Row]]:
    """Attention forward from {(implementation, shape): share of the roofline or status}."""
    rows = []
    for (implementation, shape), share in shares.items():
        status = share if isinstance(share, str) else "ok"
        row = {"device": device, "op": "attention", "pass": "forward", "dtype": "bfloat16"}
        row |= {"implementation": implementation, "role": role(implementation), "shape": shape}
        row |= {"own": row["role"] == "own", "valid": True if status == "ok" else None}
        row |= {"ceiling_tflops": 750.0, "ceiling_gb_per_s": 4200.0}
        row |= {"status": status, "reason": ""}
        if shape == "small":
            row |= {"intensity": 50.0, "bound": "memory", "roofline_tflops": 210.0}
        else:
            row |= {"intensity": 5000.0, "bound": "compute", "roofline_tflops": 750.0}
        if not isinstance(share, str):
            row |= {"share_of_roofline": share, "share_low": share, "share_high": share}
            row |= {"tflops": share * row["roofline_tflops"], "time_ms": 1.0}
        rows.append(row)
    return {"roofline": rows}


def ablation_rows(
    gains: dict[tuple[str, str], float | str], device: str = GPU, counts: bool | None = True
) -> dict[str, list[Row]]:
    """From {(component, shape): ms gained either way or status}: 10 ms of PyTorch's, 5 of ours."""
    rows = []
    for (component, shape), gain in gains.items():
        status = gain if isinstance(gain, str) else "ok"
        row = {"device": device, "component": component, "dtype": "bfloat16", "status": status}
        row |= sized(shape) | {"base_variant": "sdpa_cudnn", "full_variant": "fused"}
        row |= {"valid": counts, "base_ms": 10.0, "full_ms": 5.0}
        if counts is False:
            row |= {"why_not": "the samples were not precise enough"}
        elif not isinstance(gain, str):
            verdict = "faster" if gain > 0.1 else "ambiguous"
            row |= {"verdict_last": verdict if counts else None}
            row |= {"only_ms": 10 - gain, "without_ms": 5 + gain}
            row |= {"speedup_alone": 10 / (10 - gain), "speedup_last": (5 + gain) / 5}
            for end in ("alone", "last"):
                row |= {f"gain_{end}_ms": gain}
                row |= {f"gain_{end}_low_ms": gain - 0.1, f"gain_{end}_high_ms": gain + 0.1}
        rows.append(row)
    return {"ablation": rows}


def equal_rows(ratios: list[float], device: str = GPU) -> dict[str, list[Row]]:
    """Equal things that seemed `ratios` times as fast as each other, ±3 %: far ones are called."""
    key = {"device": device, "kind": "operator", "part": "attention forward"}
    rows = [
        key
        | {"shape": "mid", "name": "fused", "n_pairs": 2}
        | {"ratio": ratio, "low": ratio - 0.03, "high": ratio + 0.03}
        | {"verdict": "faster" if ratio > 1.04 else "ambiguous", "contains_1": ratio < 1.03}
        for ratio in ratios
    ]
    return {"equal_things": rows, "noise": [key | {"of_equals": 0.005}]}


def operator_rows(
    ratios: dict[tuple[str, str], tuple[float, str | None]], device: str = GPU
) -> dict[str, list[Row]]:
    """SwiGLU of ours from {(shape, pass): (times as fast as the best peer, verdict)}, and beside it
    another implementation of ours, half as fast.
    """
    rows = []
    for (shape, pass_), (ratio, verdict) in ratios.items():
        key = {"device": device, "op": "swiglu", "shape": shape, "pass": pass_, "own": True}
        key |= {"best_peer_implementation": "liger", "share_of_roofline": 0.9}
        for name, times in (("triton", 1), ("slower", 2)):
            found = ratio / times
            row = {"implementation": name, "time_ms": times, "speedup_best": found}
            row |= {"config_id": f"swiglu--{shape}--{name}"}
            row |= {"speedup_best_low": 0.99 * found, "speedup_best_high": 1.01 * found}
            rows.append(key | row | {"verdict_best": verdict})
    return {"operator_speedup": rows}


def host_rows(times: dict[tuple[str, str], float], device: str = GPU) -> dict[str, list[Row]]:
    """Calls of SwiGLU from {(implementation, pass): microseconds}; the first is PyTorch's."""
    problem = '{"dtype":"bfloat16","op":"swiglu","sizes":{"rows":64,"width":256}}'
    key = {"device": device, "op": "swiglu", "problem": problem, "with_launches": True}
    base = next(iter(times.values()))
    rows = [
        key
        | {"implementation": name, "pass": pass_, "n_runs": 1}
        | {"host_us": time, "times_base": time / base}
        for (name, pass_), time in times.items()
    ]
    known = [
        {"op": "swiglu", "implementation": "torch", "provider": "torch", "rank": 0},
        {"op": "swiglu", "implementation": "triton", "provider": "own", "rank": 2},
    ]
    return {"host": rows, "implementations": known}


def step_host_rows(
    times: dict[tuple[str, bool], tuple[float, float] | str],
    device: str = GPU,
    processor: str = "Xeon 8481C",
) -> dict[str, list[Row]]:
    """Forms of a step from {(variant, cuda_graph): (host's ms, ms in a loop) or the status}.

    The first is PyTorch's.
    """
    key = {"device": device, "processor": processor, "cpu_count": 16, "cpu_limit": 8.0}
    key |= {"shape": "small", "batch": 64, "n_context": 64, "n_target": 500, "dtype": "bfloat16"}
    (base, _), (base_ms, _) = next(iter(times.items()))
    rows = []
    for (variant, graph), found in times.items():
        row = key | {"variant": variant, "cuda_graph": graph, "pytorch_variant": base, "n_runs": 1}
        row |= {"role": role(variant)}
        if isinstance(found, str):
            rows.append(row | {"status": found, "reason": f"because {found}", "n_runs": 0})
            continue
        ratio = found[1] / times[variant, True][1] if (variant, True) in times else None
        row |= {"status": "ok", "host_ms": found[0], "step_ms": found[1]}
        row |= {"over_pytorch": found[0] / base_ms, "over_graph": None if graph else ratio}
        rows.append(row)
    return {"step_host": rows}


def profile_rows(
    percents: dict[str, float | str], device: str = GPU, sections: str = "full"
) -> dict[str, list[Row]]:
    """Passes of SwiGLU from {implementation: percent of DRAM's peak or status}."""
    problem = '{"dtype":"bfloat16","op":"swiglu","sizes":{"rows":64,"width":256}}'
    key = {"device": device, "op": "swiglu", "problem": problem, "shape": "tiny", "status": "ok"}
    counted = {"kernel": "k", "n_kernels": 2, "duration_us": 9.0, "dominant_share": 0.8}
    counted |= {"sm_percent": 20.0, "l2_percent": 30.0, "occupancy_percent": 50.0}
    counted |= {"registers": 64, "shared_bytes": 49152}
    if sections == "full":
        stalls = {"long scoreboard": 60.0, "wait": 30.0, "barrier": 5.0}
        for place, (name, percent) in enumerate(stalls.items(), 1):
            counted |= {f"stall_{place}": name, f"stall_{place}_percent": percent}
    rows = []
    for name, percent in percents.items():
        found = {"implementation": name, "own": role(name) == "own"}
        if isinstance(percent, str):
            found |= {"status": percent, "reason": f"because {percent}", "n_kernels": 0}
        else:
            found |= counted | {"dram_percent": percent}
        rows += [key | found | {"pass": pass_} for pass_ in ("forward", "backward")]
    return {"profiled_passes": rows}


def language_rows(
    rates: dict[str, float | str], device: str = GPU, counts: bool | None = True, **columns: object
) -> dict[str, list[Row]]:
    """Forms of Llama 3.2 1B from {form: tokens/s or status}, where the limit is 2,000 tokens/s."""
    key = {"device": device, "model": "llama3_1b", "weights": "bf16", "batch": 1, "n_prompt": 32}
    key |= {"limit_tokens_per_s": 2000.0} | columns
    roles = {"hf": "baseline", "ours": "own"}
    rows = []
    for form, rate in rates.items():
        row = key | {"form": form, "role": roles.get(form, "peer"), "status": "ok", "valid": counts}
        if isinstance(rate, str):
            row |= {"status": rate, "reason": f"because {rate}", "valid": None}
        else:
            row |= {"tokens_per_s": rate, "share_of_limit": rate / 2000}
            if form != "ours" and isinstance(rates.get("ours"), float):
                row |= {"own_speedup": rates["ours"] / rate}
                row |= {"own_verdict": "faster" if counts else None}
        rows.append(row)
    published = {"system": "megakernel", "hardware": "H100", "tokens_per_s": 1057.0}
    published |= {"basis": "counted", "source": "a paper", "published": "2025-05-27"}
    other = {"model": "llama3_1b", "weights": "bf16", "n_prompt": 32}
    literature = [published | other | {"batch": batch} for batch in (1, 64)]
    return {"language_models": rows, "literature": literature}


def merged(*parts: dict[str, list[Row]]) -> dict[str, list[Row]]:
    tables: dict[str, list[Row]] = {}
    for part in parts:
        for view, rows in part.items():
            tables.setdefault(view, []).extend(rows)
    return tables


def environments(*devices: tuple[str, str, str]) -> dict[str, list[Row]]:
    """From (slug, name, origin); what the figures of steps draw was measured on one day."""
    return {
        "environments": [
            {
                "device": slug,
                "device_name": name,
                "memory_bytes": 8 << 30,
                "recorded_at": "2026-02-01 10:00:00+00",
            }
            for slug, name, _ in devices
        ],
        "recording_days": [
            {"device": slug, "view_name": view, "origin": origin}
            | {"first_day": "2026-02-01", "last_day": "2026-02-01"}
            for slug, _, origin in devices
            for view in ("speedup", "memory", "matrix")
        ],
    }


def title(chart: Any) -> str:
    return " ".join(chart.to_dict()["title"]["text"])


H200 = environments((GPU, "NVIDIA H200", "recorded"))


def unwrapped(chart: Any) -> str:
    """Returns all that a chart says, titles of several lines as one."""
    return json.dumps(chart.to_dict(), ensure_ascii=False).replace('", "', " ")


def as_svg(chart: Any) -> str:
    return vl_convert.vegalite_to_svg(chart.to_dict())
