"""Chooses what "auto" runs at sizes of your own, on your own GPU.

    python -m tnp.tune --batch 8 --n-context 2000 --n-target 300

times every implementation that "auto" may choose, forward and backward, in processes of their own,
and enters the fastest of each operator in the table of `tnp.ops.auto`. What is not benchmarked
alone, embedding and projections, keeps the default.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict

from tnp.bench.child import require_device
from tnp.bench.isolate import run_isolated
from tnp.bench.policy import Policy
from tnp.bench.process import DeviceMissing, device_lock
from tnp.bench.provenance import device_slug
from tnp.bench.sizes import OPERATOR_SIZES, operator_sizes
from tnp.model import TNPConfig
from tnp.ops import auto, registry

TIMEOUT_S = 900.0
MODEL = {
    name: getattr(TNPConfig(), name) for name in ("d_model", "n_heads", "d_ff", "n_components")
}
DTYPES = ("bfloat16", "float16", "float32")
LINE = "{:<14} {:<14} {:>12} {:>12}  {}"

Times = dict[str, dict[str, float]]  # implementation → pass → median in ms


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 where an operator could not be timed at all; 2 without a GPU."""
    wanted = _parser().parse_args(arguments)
    device = device_slug()
    try:
        if device == "cpu":
            raise DeviceMissing("none is visible here")
        require_device(device)
    except DeviceMissing as error:
        print(f"python -m tnp.tune needs an NVIDIA GPU: {error}", file=sys.stderr)
        return 2
    import torch

    major, minor = torch.cuda.get_device_capability()
    print(LINE.format("operator", "implementation", "forward ms", "backward ms", ""))
    entries = []
    for op in OPERATOR_SIZES:
        parameters = _parameters(op, wanted, device)
        with device_lock(device):
            rows = run_isolated("op", parameters, TIMEOUT_S)["ops"]
        times, reasons = _times(rows), _reasons(rows)
        whole = {name: auto.training_ms(op, **passes) for name, passes in times.items()}
        chosen = auto.fastest(op, whole) if whole else None
        for name in parameters["implementations"]:
            passes = [f"{time:.4g}" for time in times.get(name, {}).values()] or ["", ""]
            note = reasons.get(name, "chosen" if name == chosen else "")
            print(LINE.format(op, name, *passes, note).rstrip())
        if chosen is not None:
            entries.append(auto.entry_of(parameters, 10 * major + minor, chosen))
    auto.write_table([*auto.table(), *entries])
    print(f"{len(entries)} entries for {device}: {auto.TABLE}")
    return 0 if len(entries) == len(OPERATOR_SIZES) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tnp.tune", description="Choose what 'auto' runs at these sizes."
    )
    for name in ("batch", "n_context", "n_target"):
        parser.add_argument(_option(name), type=_size, required=True)
    for name, default in MODEL.items():
        parser.add_argument(_option(name), type=_size, default=default)
    parser.add_argument(
        "--d-ff-storage",
        type=_size,
        help="width that hidden layers are zero-padded to; the next multiple of 64 where not given",
    )
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    return parser


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _size(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least 1")
    return int(text)


def _parameters(op: str, wanted: argparse.Namespace, device: str) -> dict:
    """Of an operator's benchmark with all that "auto" may choose."""
    model = {name: getattr(wanted, name) for name in MODEL}
    d_ff_storage = wanted.d_ff_storage or -(-wanted.d_ff // 64) * 64
    config_id = f"tune--{op}"
    return {
        "config_id": config_id,
        "op": op,
        "implementations": {name: f"{config_id}--{name}" for name in registry.CANDIDATES[op]},
        "shape": "tune",
        **operator_sizes(op, vars(wanted), model, d_ff_storage),
        "dtype": wanted.dtype,
        "replicate": 1,
        "timing": asdict(Policy()),
        "device": "cuda",
        "device_slug": device,
    }


def _times(rows: list[dict]) -> Times:
    """Of those implementations whose passes could all be timed."""
    failed = _reasons(rows)
    times: Times = {}
    for row in rows:
        if row["implementation"] not in failed:
            times.setdefault(row["implementation"], {})[row["pass"]] = row["time_ms_p50"]
    return times


def _reasons(rows: list[dict]) -> dict[str, str]:
    """Why an implementation was not timed, of those that were not."""
    return {
        row["implementation"]: f"{row['status']}: {row['reason']}"
        for row in rows
        if row["status"] != "ok"
    }


if __name__ == "__main__":
    sys.exit(main())
