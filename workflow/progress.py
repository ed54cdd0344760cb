"""Keeps Snakemake's own messages to what a reader wants: errors, and nothing a job says better."""

import logging
import os

from snakemake_interface_logger_plugins.common import LogEvent

from workflow.jobs import PROGRESS

CHATTER = ("Select jobs to execute", "Execute ", "Elapsed time")
SILENT = {
    LogEvent.JOB_INFO,
    LogEvent.JOB_STARTED,
    LogEvent.JOB_FINISHED,
    LogEvent.PROGRESS,
    LogEvent.SHELLCMD,
}


class Progress(logging.Filter):
    """Counts the jobs, for the next one to say "[12/34]", in place of the messages it drops."""

    def __init__(self, total: int) -> None:
        super().__init__()
        self._next(0, total)

    def filter(self, record: logging.LogRecord) -> bool:
        event = getattr(record, "event", None)
        if event == LogEvent.PROGRESS:
            self._next(record.done, record.total)
        return event not in SILENT and not str(record.msg).startswith(CHATTER)

    def _next(self, done: int, total: int) -> None:
        os.environ[PROGRESS] = f"{min(done + 1, total)}/{total}"
