"""Runs `python -m tnp.tuning`."""

from tnp.tuning.tune import main
from tnp.util.cli import end_with

end_with(main)
