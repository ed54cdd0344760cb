"""The profiles: options that Snakemake has, and one that goes for a cluster as for one machine."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from snakemake.cli import get_argument_parser

ROOT = Path(__file__).parents[2]
PROFILES = {
    path.parent.name: yaml.safe_load(path.read_text())
    for path in ROOT.glob("profiles/*/config.yaml")
}
OPTIONS = get_argument_parser()._option_string_actions
# What must not depend on where the jobs run: which of them run, and what one's failure stops.
SHARED = ("scheduler", "ignore-incomplete", "rerun-triggers", "nolock", "keep-going")


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_names_options_that_there_are(name):
    keys = {key for key in PROFILES[name] if not re.match(r"__|slurm-", key)}
    assert {f"--{key}" for key in keys} <= OPTIONS.keys()


def test_a_cluster_runs_the_jobs_that_one_machine_would():
    default, slurm = PROFILES["default"], PROFILES["slurm"]
    assert {key: slurm[key] for key in SHARED} == {key: default[key] for key in SHARED}


def test_a_cluster_gives_a_jobs_threads_and_its_gpu():
    slurm = PROFILES["slurm"]
    assert slurm["executor"] == "slurm" and slurm["cores"] > PROFILES["default"]["cores"]
    assert slurm["resources"]["gpu"] >= slurm["jobs"]


@pytest.mark.parametrize("name", PROFILES)
def test_a_configuration_that_is_not_there_is_one_sentence(name):
    call = [sys.executable, "-m", "snakemake", "-n", "all", "--workflow-profile"]
    call += [f"profiles/{name}", "--configfile", "nowhere.yaml"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("nowhere.yaml: there is no such file in ")
