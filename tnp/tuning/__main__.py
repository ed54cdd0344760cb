"""Runs `python -m tnp.tuning`, with an operator and its sizes or with those of a training step."""

from tnp.tuning.tune import main
from tnp.util.cli import end_with

end_with(main)
