"""`python -m tests.faults`: every kind of fault as often as asked for; red where one did harm."""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from tests.faults import configurations, disks, files, kills

KINDS = {
    "kills": (kills.run, "times that a workflow is killed and continued"),
    "configurations": (configurations.run, "configurations that must be refused"),
    "files": (files.run, "Parquet files made bad"),
    "disks": (disks.run, "sizes of a disk that fills"),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    for kind, (_, what) in KINDS.items():
        parser.add_argument(f"--{kind}", type=int, default=0, metavar="N", help=what)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    harm = 0
    for kind, (run, what) in KINDS.items():
        if n := getattr(arguments, kind):
            start = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="tnp-faults-") as folder:
                found = run(n, Path(folder), Random(arguments.seed))
            print(
                f"{n} {what}: {len(found)} did harm, {time.monotonic() - start:.0f} s", flush=True
            )
            for sentence in found:
                print(f"  {sentence}")
            harm += len(found)
    sys.exit(harm > 0)


if __name__ == "__main__":
    main()
