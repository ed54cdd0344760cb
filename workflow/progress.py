"""Hides Snakemake's own messages, except errors: each job reports its result itself."""

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
    """Drops messages, and counts the jobs so that the next one can say "[12/34]"."""

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
