"""Runs `snakemake --lint` and fails on what it finds, one demand aside.

It asks every rule for a conda environment or a container. This workflow runs in the one environment
of requirements.txt, which `make all` sets up.
"""

import json
import subprocess
import sys

NOT_ASKED = "Specify a conda environment or container for each rule."


def findings() -> list[str]:
    """What the linter says, one line each, as "rule …: title"."""
    lint = subprocess.run(["snakemake", "--lint", "json"], capture_output=True, text=True)
    try:
        report = json.loads(lint.stdout)
    except json.JSONDecodeError:  # it could not read the workflow, and says why
        return [lint.stderr.strip()]
    return [
        f"{where}: {lint['title']}"
        for kind in ("rules", "snakefiles")
        for entry in report[kind]
        for where in [entry["for"].get("rule") or entry["for"]["snakefile"]]
        for lint in entry["lints"]
        if lint["title"] != NOT_ASKED
    ]


if __name__ == "__main__":
    found = findings()
    sys.exit("\n".join(found) or 0)
