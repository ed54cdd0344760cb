"""Runs `python -m tnp.store record RUNS RECORDED`."""

from tnp.store.files import main

main()
