"""``omnilearn report RUN [RUN…]``: one page that works offline."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from omnilearn.errors import OmniLearnError, UsageError
from omnilearn.observe.runs import find

DESCRIPTION = """\
Make a page from the events of a run: what the cluster is, what was gained, where time went, with figures.
Several runs are shown side by side. The page is one file, needs no network and can be sent as it is."""

EPILOG = """\
examples:
  omnilearn report                                 the last run below runs/
  omnilearn report runs/20261115-053049            one run
  omnilearn report runs/ddp runs/omni -o both.html side by side
  omnilearn report RUN --tensorboard               also write TensorBoard's files into RUN

exit codes: 0 success, 2 there is nothing to show"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("runs", metavar="RUN", nargs="*", help="log folders (default: the last below runs/)")
    parser.add_argument("-o", "--output", metavar="PATH", default="report.html", help="(default: report.html)")
    parser.add_argument(
        "--tensorboard", action="store_true", help="also write TensorBoard's files (omnilearn run does it by itself)"
    )


def main(args: argparse.Namespace) -> int:
    try:
        folders = [find(run) for run in args.runs] or [find(None)]
        problems = write(folders, args.output)
        if args.tensorboard:
            from omnilearn.observe.tensorboard import TensorBoard
            from omnilearn.observe.track import replay

            for folder in folders:
                replay(folder, TensorBoard(folder))
    except UsageError as error:
        print(f"omnilearn report: {error}", file=sys.stderr)
        return 2
    for problem in problems:
        print(f"omnilearn report: {problem}", file=sys.stderr)
    print(args.output)
    return 0


def write(folders: Sequence[str | os.PathLike[str]], path: str | os.PathLike[str]) -> list[str]:
    """Write the report of these runs; returns, in words, what could not be shown."""
    from omnilearn.observe.report.load import load_all
    from omnilearn.observe.report.page import page

    loaded, problems = load_all(folders)
    save(page(loaded, problems), path)
    return problems + [problem for run in loaded for problem in run.problems]


def save(text: str, path: str | os.PathLike[str]) -> None:
    """Either all of the page is there afterwards or what was there before."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=target.parent, prefix=f".{target.name}.", encoding="utf-8", delete=False
        ) as file:
            file.write(text)
        os.chmod(file.name, 0o644)
        os.replace(file.name, target)
    except OSError as error:
        raise OmniLearnError(f"cannot write {target}: {error.strerror}: choose another path with -o") from error
