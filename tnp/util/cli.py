"""What the command lines share: one sentence for a mistake, and tables of text."""

from __future__ import annotations

import argparse
import codecs
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from tnp.util.extras import MissingExtra


class Parser(argparse.ArgumentParser):
    """Names options in full, and ends with one sentence and exit code 2 where they are wrong."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, allow_abbrev=False, **options)

    def parse_known_args(self, args=None, namespace=None):
        """As argparse's; an option that there is not is named, before others that are missing."""
        given = sys.argv[1:] if args is None else args
        names = [text.partition("=")[0] for text in given if text.startswith("--")]
        unknown = next((name for name in names if name not in self._option_string_actions), None)
        if unknown and unknown != "--":
            self.error(f"unknown option {unknown}: --help says what there is")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Exit code 2."""
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)


def end_with(main: Callable[[], int]) -> NoReturn:
    """Ends the process with main's exit code; in silence where nobody reads its output any more.

    Where a package is missing that an extra brings, a sentence says so and the exit code is 1. What
    the output's encoding has no character for is written in ASCII: "us" for "µs".
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
    except BrokenPipeError:  # of `| head`; what is left would raise again when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


ASCII = {"µ": "u", "×": "x", "…": "...", "–": "-", "−": "-", "·": "*", "ᵀ": "T"}


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """A handler of `codecs`: each character that cannot be encoded as ASCII, or "?"."""
    text = error.object[error.start : error.end]
    return "".join(ASCII.get(character, "?") for character in text), error.end


def option(name: str) -> str:
    """ "n_context" as it is written: "--n-context"."""
    return "--" + name.replace("_", "-")


def size(text: str) -> int:
    """A whole number, at least 1, of an option."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least 1")
    return int(text)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Columns of equal width; those whose numbers stand in `right` end at the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join(map(line, (header, *rows)))
