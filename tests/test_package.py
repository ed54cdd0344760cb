"""Tests the package as users install it: a wheel, its core without the workflow's packages."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tnp.dispatch import devices, spec
from tnp.dispatch.spec import Call, triton_from
from tnp.util import extras

ROOT = Path(__file__).parents[1]
PROJECT, LAB = (
    tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    for folder in (".", "lab")
)
# Packages of requirements.txt that neither the core needs, nor the tests alone.
BEYOND_THE_CORE = (
    "pyarrow", "duckdb", "altair", "vl_convert", "snakemake", "pydantic", "yaml", "skimage",
    "pynvml", "tqdm", "pytz", "pytest", "transformers",
)  # fmt: skip

PROGRAM = """
import sys
missing = sys.argv[1].split(",")
sys.modules.update(dict.fromkeys(missing))  # None: as if it were not installed
import tnp, torch
import tnp.train.loop
assert "torch._dynamo" not in sys.modules  # it takes a second, half of what the import took
from tnp.model.config import TNPConfig
from tnp.model.transformer_np import TransformerNP
from tnp.train.step import TrainingStep
from tnp.tasks.gaussian_process import GaussianProcessTasks
from tnp.tasks.images import ImageTasks
from tnp.train.loop import fit
from tnp.model.variants import Variant

config = TNPConfig(d_model=32, n_layers=1, n_heads=2, d_ff=20, n_components=2)
model = TransformerNP(config, Variant.named("auto", config.d_ff), torch.float32)
source, step = GaussianProcessTasks(), TrainingStep(model, learning_rate=1e-3)
run = fit(step, lambda index: source.sample(0, index, 2, 5, 7), 3, every=3)
assert run.reports[-1]["step"] == 3
model.save("kept")
task = source.sample(0, 9, 2, 5, 7)
again = TransformerNP.load("kept", "sdpa_flash")
assert torch.allclose(again.predict(task.context, task.x_target).mean,
                      model.predict(task.context, task.x_target).mean, atol=1e-4)
for name in ("fused", "separate"):
    try:
        TransformerNP.load("kept", name).loss(task)
    except RuntimeError as error:
        print(error)
if "skimage" in missing:
    try:
        ImageTasks(100)
    except ImportError as error:
        print(error)
print(tnp.__file__)
"""


def run(folder: Path, path: Path, *missing: str) -> list[str]:
    """Returns the lines that the program prints in a folder, with the package from `path`."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, ",".join(missing)],
        cwd=folder, capture_output=True, text=True,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        | {"PYTHONPATH": str(path), "XDG_CACHE_HOME": str(folder / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_wheel_trains_keeps_and_predicts_with_nothing_but_the_core(tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    source = tmp_path / "source"
    for name in ("tnp", "pyproject.toml", "README.md", "LICENSE"):
        target = source / name
        target.parent.mkdir(exist_ok=True)
        subprocess.run(["cp", "-r", ROOT / name, target], check=True)
    wheels, site, work = (tmp_path / name for name in ("wheels", "site", "work"))
    work.mkdir()
    build = ["wheel", "--no-deps", "--no-build-isolation", "-w", wheels, source]
    subprocess.run([*pip, *build], check=True)
    (wheel,) = wheels.glob("tnp_kernels-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)
    assert (site / "tnp/dispatch/tables/nvidia-h200.json").is_file() and (
        site / "tnp/model/variants.toml"
    ).is_file()
    *said, file = run(work, site, *BEYOND_THE_CORE, "triton")
    assert file == str(site / "tnp/__init__.py")
    missing = "triton is not installed, in which it is written"
    assert [missing in line for line in said] == [True, True, False]
    assert said[-1].endswith(f": run {extras.install('images')}")
    assert not list(site.glob("tnp_lab*"))
    assert not list(site.glob("tnp/**/*.tmp")) and not (work / "tnp").exists()


def test_on_a_gpu_without_triton_ours_say_why_they_cannot_run(monkeypatch):
    call = Call(spec.Problem("attention", "bfloat16", ()), devices.named("NVIDIA H200"))
    assert triton_from(80)(call) is None
    monkeypatch.setattr(spec, "triton_is_installed", lambda: False)
    assert "triton is not installed" in triton_from(80)(call)


def test_what_needs_an_extra_names_it():
    with pytest.raises(
        ImportError, match=r"plots need no_such: run pip install '\.\[plot\]' in a clone"
    ):
        extras.require("no_such", "plots", "plot")


def test_every_pin_lies_in_the_packages_ranges():
    from packaging.requirements import Requirement

    extras = PROJECT["optional-dependencies"] | LAB["optional-dependencies"]
    ranges = [*PROJECT["dependencies"], *sum(extras.values(), [])]
    wanted = {Requirement(text).name: Requirement(text).specifier for text in ranges}
    lines = re.sub(r"#.*", "", (ROOT / "requirements.txt").read_text()).split("\n")
    pins = {}
    for line in filter(None, map(str.strip, lines)):
        requirement = Requirement(line)
        pins[requirement.name] = next(iter(requirement.specifier)).version
    assert pins.keys() <= wanted.keys()
    for name, version in pins.items():
        assert wanted[name].contains(version), name


COMMANDS = """
import contextlib, io, json, runpy, sys
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))
for arguments in json.loads(sys.argv[2]):
    sys.argv, status = arguments, 0
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            status = ended.code
    print(json.dumps((status, out.getvalue(), error.getvalue(), "torch" in sys.modules)))
"""
ROPE = ["--batch=1", "--n-heads=2", "--n-kv-heads=2", "--n-tokens=8", "--head-dim=64"]
TUNE = ["--batch=2", "--n-context=20", "--n-target=10"]
MEASURING = [["tnp.bench", "rope", *ROPE], ["tnp.tuning", *TUNE], ["tnp.tuning.fit_costs"]]


def test_commands_of_the_core_run_and_those_that_measure_name_the_extra():
    """All run in one process, with nothing but the core installed."""
    asked = [["tnp.tuning", "--help"], *([call[0], "--help"] for call in MEASURING)]
    asked += [["tnp.tuning.device", "--capability", "75"], *MEASURING]
    call = [sys.executable, "-c", COMMANDS, ",".join(BEYOND_THE_CORE), json.dumps(asked)]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert not found[0][-1], "help waits for PyTorch"
    assert [status or 0 for status, *_ in found[:5]] == [0] * 5
    assert "attention" in found[4][1]
    for status, printed, said, _ in found[5:]:
        assert not printed
        (line,) = (said or status).splitlines()
        assert line.endswith(f": run {extras.install('workflow')}")
