"""Faults that the experiment must survive: kills, bad configurations, bad files, a disk that fills.

`python -m tests.faults --kills 200 --configurations 200 --files 60 --disks 40` repeats it, and the
tests run a small form. Each module provokes one kind of fault and returns a sentence for every time
that something was lost, false or unclear; an empty list is what is wanted.
"""
