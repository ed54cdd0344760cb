"""The files that the Snakemake workflow catalog reads are there and name what there is."""

import re
import subprocess
import sys
from pathlib import Path

import yaml

from workflow.studies import configuration

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "config/README.md"


def targets(snakefile: str) -> list[str]:
    call = [sys.executable, "-m", "snakemake", "--snakefile", snakefile, "--list-target-rules"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_settings_are_those_that_the_catalog_reads():
    usage = yaml.safe_load((ROOT / ".snakemake-workflow-catalog.yml").read_text())["usage"]
    assert usage["report"] is True
    assert usage["software-stack-deployment"].keys() == {"conda", "apptainer", "apptainer+conda"}
    # A rule with an environment would make the entry wrong.
    rules = [*ROOT.glob("workflow/rules/*.smk"), ROOT / "Snakefile"]
    assert not any(usage["software-stack-deployment"].values())
    assert not any(re.search(r"^\s*(conda|container):", p.read_text(), re.M) for p in rules)


def test_the_snakefile_that_the_catalog_looks_for_is_the_workflow():
    found = targets("workflow/Snakefile")
    assert "all" in found and found == targets("Snakefile")
    documents = (
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "config/README.md", "docs/running.md")
    )
    said = re.findall(
        r"snakemake (?:-n|--cores 1) (\w+)", "".join(p.read_text() for p in documents)
    )
    assert {"figures", "tune"} <= set(said) and set(said) - {"my_study"} <= set(found)


def test_the_text_explains_every_key_and_its_links_lead_somewhere():
    text = TEXT.read_text()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (TEXT.parent / link).is_file(), link
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    explained = re.findall(r"`(\w+)`", "".join(rows))
    assert sorted(explained) == sorted(configuration().model_fields)
