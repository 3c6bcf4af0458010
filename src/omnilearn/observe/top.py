"""``omnilearn top [RUN]``: the live view of a run that is under way (or was), from its log folder."""

from __future__ import annotations

import argparse
import sys
import time

from omnilearn.errors import UsageError
from omnilearn.observe.runs import find

DESCRIPTION = """\
Watch a run: each worker's batch, how long it computes and waits, how far training is, and what was planned. Reads the
run's log folder, so it can be started and ended at any time. Without a terminal it prints a line now and then."""

EPILOG = """\
examples:
  omnilearn top                          the last run below runs/
  omnilearn top runs/20261115-053049     this one
  omnilearn top --once                   how it stands now

exit codes: 0 the run is over (or --once), 2 there is no run, 130 interrupted"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("run", metavar="RUN", nargs="?", help="its log folder (default: the last below runs/)")
    parser.add_argument("--once", action="store_true", help="show how it stands now, and end")


def main(args: argparse.Namespace) -> int:
    from omnilearn.observe.live import LiveView

    try:
        folder = find(args.run)
    except UsageError as error:
        print(f"omnilearn top: {error}", file=sys.stderr)
        return 2
    view = LiveView(folder, str(folder))
    view.starting = "no events yet"
    if args.once:
        view.update(show=False)
        view.console.print(view.render())
        return 0
    with view:
        view.follow(lambda: not view.board.ended)
    last = view.board.last
    if view.board.error:
        view.console.print(f"failed {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(last))}", markup=False)
    return 0
