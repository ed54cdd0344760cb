"""Runs `snakemake --lint` and fails on what it finds, one demand aside.

It asks every rule for a conda environment or a container. This workflow runs in the one environment
of requirements.txt, which `make all` sets up.
"""

import subprocess
import sys

from tnp.util.cli import Parser

NOT_ASKED = "Specify a conda environment or container for each rule."
WHERE, TITLE = "Lints for ", "    * "


def findings(report: str) -> list[str]:
    """Returns one line per finding in `report`, the text that the linter printed.

    Snakemake 9.27 does not print its findings as JSON.
    """
    found, where = [], ""
    for line in report.splitlines():
        if line.startswith(WHERE):
            where = line.removeprefix(WHERE)
        elif line.startswith(TITLE) and NOT_ASKED not in line:
            found.append(f"{where} {line.removeprefix(TITLE)}")
    return found


if __name__ == "__main__":
    Parser(prog="python -m workflow.lint", description=__doc__).parse_args()
    lint = subprocess.run(["snakemake", "--lint"], capture_output=True, text=True)
    if WHERE not in lint.stderr and lint.returncode:  # it could not read the workflow
        sys.exit(lint.stderr)
    sys.exit("\n".join(findings(lint.stderr)) or 0)
