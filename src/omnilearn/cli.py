"""The ``omnilearn`` command: parses arguments, calls the module that does the work, turns errors into exit codes.

It computes nothing. Each command lives in the module named in ``COMMANDS``, which is imported only when needed
and offers ``add_arguments(parser)`` and ``main(args) -> int``.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import ClassVar, NoReturn

from omnilearn import __version__
from omnilearn.errors import InfeasibleError, OmniLearnError, UsageError, meant

COMMANDS = {
    "demo": ("omnilearn.demo.command", "see it work on this machine (two minutes)"),
    "bench": ("omnilearn.bench.command", "measure: how fast, and how near the limit?"),
    "report": ("omnilearn.observe.report.command", "make a page with figures from the events of a run"),
    "top": ("omnilearn.observe.top", "watch a run that is under way"),
    "run": ("omnilearn.cluster.run", "start a training script on several workers"),
}

DESCRIPTION = """\
OmniLearn: data-parallel training for clusters whose machines differ.
Each worker gets its own batch size, resized while training runs, so that nobody waits for the slowest."""

EPILOG = """\
start here:
  omnilearn demo                            see it work on this machine (two minutes)
  omnilearn run --nproc 4 train.py          train with four workers on this machine
  omnilearn COMMAND --help                  all options of a command

exit codes: 0 success, 1 the work failed, 2 wrong use, 130 interrupted"""


class Parser(argparse.ArgumentParser):
    """Says which option was meant, where one is misspelt."""

    known: ClassVar[list[str]] = []

    def error(self, message: str) -> NoReturn:
        known = [*COMMANDS, *self.known]
        for word in re.findall(r"--[\w-]+|invalid choice: '(\w+)'", message) and re.findall(r"[\w-]+", message):
            if word not in known and (hint := meant(word, known)):
                message += hint
                break
        super().error(message)


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The whole parser; arguments of commands other than ``only`` are left out, with the imports they need."""
    parser = Parser(
        "omnilearn",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"omnilearn {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    for name, (module, summary) in COMMANDS.items():
        sub = commands.add_parser(
            name, help=summary, description=summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name == only:
            import_module(module).add_arguments(sub)
            Parser.known = [word for action in sub._actions for word in action.option_strings]
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    args = build_parser(chosen).parse_args(arguments)
    try:
        return int(import_module(COMMANDS[args.command][0]).main(args))
    except OmniLearnError as error:
        print(f"omnilearn: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError | InfeasibleError) else 1
    except KeyboardInterrupt:
        print("omnilearn: interrupted", file=sys.stderr)
        return 130
