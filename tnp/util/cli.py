"""Helps command lines: one sentence for a mistake, and tables of text."""

from __future__ import annotations

import argparse
import codecs
import os
import sys
from collections.abc import Callable, Sequence
from math import inf
from typing import NoReturn

from tnp.util.extras import MissingExtra


class Parser(argparse.ArgumentParser):
    """Parses options by full names, and ends with one sentence and exit code 2 for a mistake."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, allow_abbrev=False, **options)

    def parse_known_args(self, args=None, namespace=None):
        """Parses as argparse does, but names an unknown option before a missing one."""
        given = sys.argv[1:] if args is None else args
        names = [text.partition("=")[0] for text in given if text.startswith("--")]
        unknown = next((name for name in names if name not in self._option_string_actions), None)
        if unknown and unknown != "--":
            self.error(f"unknown option {unknown}: --help lists the options")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Prints the message and ends with exit code 2."""
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)


def end_with(main: Callable[[], int]) -> NoReturn:
    """Ends the process with main's exit code, silently if nobody reads its output any more.

    If a package of an extra is missing, it prints a sentence and the exit code is 1. Characters
    that the output's encoding lacks are written in ASCII: "us" for "µs".
    """
    codecs.register_error("tnp.ascii", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="tnp.ascii")
    try:
        code = main()
        sys.stdout.flush()
    except MissingExtra as error:
        sys.exit(str(error))
    except BrokenPipeError:  # as in `| head`; unwritten text would raise again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


ASCII = {"µ": "u", "×": "x", "…": "...", "–": "-", "−": "-", "·": "*", "ᵀ": "T"}


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Returns the ASCII form, or "?", of characters that cannot be encoded, for `codecs`."""
    text = error.object[error.start : error.end]
    return "".join(ASCII.get(character, "?") for character in text), error.end


def option(name: str) -> str:
    """Returns the option of a name: "--n-context" for "n_context"."""
    return "--" + name.replace("_", "-")


def size(text: str) -> int:
    """Returns an option's whole number, at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least 1")
    return int(text)


def seconds(text: str) -> float:
    """Returns an option's number of seconds, at least 0."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0.0 <= number < inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds, at least 0")
    return number


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Returns text in columns. Columns whose numbers are in `right` are aligned to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join(map(line, (header, *rows)))
