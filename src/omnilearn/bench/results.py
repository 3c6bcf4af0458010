"""``docs/results.md`` from the records of benchmarks: ``python -m omnilearn.bench.results docs/results/*.json``.

Everything in it comes from the JSON files; same files, same text. A test compares the two.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from omnilearn.bench.record import SCHEMA, cores_in_words
from omnilearn.bench.sections import CLUSTERS, SECTIONS, Data, cluster
from omnilearn.errors import OmniLearnError, UsageError

HEAD = """\
# Results

Made by `make results` from the files in `docs/results/`; do not edit. Every number is a ratio or a median measured in
one run on the same work, with contestants taking turns (`omnilearn bench NAME --help`). *Uniform* is raw
DistributedDataParallel with equal batches, *oracle* the best of all fixed splits tried in that run. The fastest of
several noisy ones is that partly by luck: records made after 2026-11-15, 15:26 UTC compare each round with the split
that was the fastest in the other rounds, older ones with the fastest of all. In records made before 18:46 UTC of that
day on CPUs, equal contestants may differ by a tenth: by page faults, and by when it was their turn. In those made
before 2026-11-17, 14:00 UTC OmniLearn learns more slowly on CPUs: each new largest batch took three slow steps. In
those before 2026-11-18, 21:40 UTC whoever was parked after steps with one batch only was tried again late.

The papers (Tyagi and Sharma, ACSOS 2020 and OmniLearn 2025) claim 14–85% less training time, 26% on average, on CPU
clusters of their heterogeneity levels; 4 times the speed for ResNet-50 on a GPU + CPU pair, and 4.5 times on two T4 and
two P4 cards.
"""


def render(records: Iterable[tuple[str, Data]]) -> str:
    """The page for these records, each with the name of its file."""
    chapters: dict[str, list[tuple[str, Data]]] = {}
    for name, record in sorted(records, key=lambda item: item[0]):
        if record["bench"] not in SECTIONS:
            raise UsageError(f"{name}: unknown benchmark {record['bench']!r}: there are {', '.join(SECTIONS)}")
        chapters.setdefault(_title(record), []).append((name, record))
    parts = [HEAD]
    if not chapters:
        parts.append("No results yet: `omnilearn bench sync --json docs/results/sync.json`, then `make results`.\n")
    order = {name: place for place, name in enumerate(SECTIONS)}
    titles = sorted(chapters, key=lambda title: order[chapters[title][0][1]["bench"]])
    parts += [*(f"- [{title}](#{_anchor(title)}): {_count(len(chapters[title]))}" for title in titles), ""]
    for title in titles:
        parts.append(f"## {title}\n")
        for name, record in chapters[title]:
            parts += [f"### {name.removesuffix('.json')}\n", _origin(name, record)]
            parts += SECTIONS[record["bench"]][1](record)
    return "\n".join(parts)


def _title(record: Data) -> str:
    title = SECTIONS[record["bench"]][0]
    return f"{title} {CLUSTERS[cluster(record)][0]}" if record["bench"] in ("sync", "async") else title


def _anchor(title: str) -> str:
    """What a heading can be linked by."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _count(records: int) -> str:
    return "1 record" if records == 1 else f"{records} records"


def _origin(name: str, record: Data) -> str:
    here = record["machine"]
    gpu = f", {', '.join(here['gpu'])}" if here["gpu"] else ""
    torch = f", torch {here['torch']}" if here["torch"] else ""
    cut = " **Unfinished**: what there was when it was interrupted." if record["summary"].get("unfinished") else ""
    return (
        f"`{record['command']}` on {record['date'][:10]}: {here['cpu']}, {cores_in_words(here)}{gpu}, "
        f"Python {here['python']}{torch}, OmniLearn {record['version']} ([{name}](results/{name})).{cut}\n"
    )


def read(path: Path) -> Data:
    try:
        record: Data = json.loads(path.read_text(encoding="utf-8"))
        schema = record["schema"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a benchmark's record: {type(error).__name__}: {error}") from error
    if schema != SCHEMA:
        raise UsageError(f"{path} has schema {schema}, this version reads {SCHEMA}: run the benchmark again")
    return record


def main(arguments: Sequence[str]) -> int:
    try:
        print(render((Path(word).name, read(Path(word))) for word in arguments), end="")
    except OmniLearnError as error:
        print(f"omnilearn: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
