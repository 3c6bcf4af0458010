"""``omnilearn bench NAME``: finds the benchmark, runs it, prints its tables and writes its record.

Each benchmark is a module with ``add_arguments(parser)`` and ``run(args) -> Record``, imported only when it is chosen.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import Any

from omnilearn.bench.record import check_writable

BENCHMARKS = {
    "control": ("omnilearn.bench.control", "how fast are batches planned, and how near the optimum do they end?"),
    "overhead": ("omnilearn.bench.overhead", "what does OmniLearn cost where it has nothing to do?"),
    "events": ("omnilearn.bench.events", "what do a run's events cost?"),
    "sync": ("omnilearn.bench.sync", "how much faster than uniform DDP, how near the best fixed split?"),
    "async": ("omnilearn.bench.asynchronous", "what does dynamic batching change where nobody waits?"),
    "overlap": ("omnilearn.bench.overlap", "what is it worth to send gradients while they are computed (async mode)?"),
    "dynamic": ("omnilearn.bench.dynamic", "how soon does it follow a cluster that changes?"),
    "memory": ("omnilearn.bench.memory", "what are micro-batches worth where a share does not fit into memory?"),
    "network": ("omnilearn.bench.network", "what do slow links between the workers change?"),
    "ablation": ("omnilearn.bench.ablation", "what is each part worth, in time to an accuracy?"),
}

DESCRIPTION = """\
Measure OmniLearn on this machine. Every benchmark prints tables and can write its numbers as JSON.
Progress goes to stderr, tables to stdout."""

EPILOG = """\
examples:
  omnilearn bench control                         all of it, about a minute
  omnilearn bench sync --quick --model even       a rough look at the papers' four levels
  omnilearn bench sync --levels HL8 --model heavy --json results.json --report page.html
  omnilearn bench dynamic                         the levels change while training runs
  omnilearn bench network --rates 100Mbit,20Mbit  slow links between the workers (root)
  omnilearn bench ablation                        what each part is worth
  omnilearn bench sync --help                     all options of a benchmark

Other programs on the machine spoil times: close them, and believe ratios rather than seconds."""


class _Lazy(argparse.ArgumentParser):
    """A parser that asks its benchmark for its arguments only when that benchmark was chosen."""

    module = ""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.module:
            import_module(self.module).add_arguments(self)
            self.module = ""
        return super().parse_known_args(args, namespace)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.set_defaults(bench_help=parser.print_help)
    names = parser.add_subparsers(dest="bench", metavar="BENCHMARK", title="benchmarks", parser_class=_Lazy)
    for name, (module, summary) in BENCHMARKS.items():
        sub = names.add_parser(name, help=summary, description=f"{name}: {summary}")
        sub.module = module
        sub.add_argument("--json", metavar="PATH", help="also write the numbers to this file (folders are made)")
        sub.add_argument("--report", metavar="PATH", help="also write a page with figures to this file")
        sub.add_argument("--quick", action="store_true", help="fewer repeats: some seconds, rough numbers")


def main(args: argparse.Namespace) -> int:
    if args.bench is None:
        args.bench_help(sys.stderr)
        return 2
    for path in filter(None, (args.json, args.report)):
        check_writable(path)
    record = import_module(BENCHMARKS[args.bench][0]).run(args)
    record.show()
    if args.json:
        record.write(args.json)
        print(f"written: {args.json}", file=sys.stderr)
    if args.report:
        from omnilearn.bench.page import page
        from omnilearn.observe.report.command import save

        save(page(record), args.report)
        print(f"written: {args.report}", file=sys.stderr)
    return 0
