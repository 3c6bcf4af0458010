"""What each benchmark's record says, in Markdown: one function each. ``results`` makes a page of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from omnilearn.bench.record import cell

Data = Mapping[str, Any]

CLUSTERS = {
    "levels": ("at the papers' levels", "14–85% less time, 26% on average"),
    "cards": ("on unequal cards", "4.5 times as fast on two T4 and two P4"),
    "mixed": ("on a card beside a CPU", "4 times as fast for ResNet-50"),
    "other": ("on another cluster", "14–85% less time on CPU clusters, 26% on average"),
}
"""What a cluster is, in words, and what the papers claim for such a one."""


def cluster(record: Data) -> str:
    """Of what kind a record's workers are. Early records do not name their devices, only their cluster."""
    summary = record["summary"]
    name = next(iter(summary["levels"]), "HL")  # none yet, where a benchmark was interrupted
    devices = set(summary.get("devices") or (["cuda"] if "mps=" in name else ["cuda", "cpu"] if "gpu" in name else []))
    if "cuda" in devices:
        return "mixed" if "cpu" in devices else "cards"
    return "levels" if name.startswith("HL") else "other"


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [[column.replace("_", " ") for column in columns], ["---"] * len(columns)]
    lines += [[cell(value) for value in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _spread(values: Sequence[float] | None) -> str:
    return f"{cell(values[0])}–{cell(values[1])}" if values and None not in values else "–"


def _percent(value: float) -> str:
    return f"{100 * value:.0f}%"


# --- one function per benchmark -----------------------------------------------------------------------------


def _overhead(record: Data) -> list[str]:
    summary = record["summary"]
    rows = [
        [model, contestant, own["step_ms"], *(f"{own[contestant][key]:.3f}" for key in ("ratio", "ratio_of_totals")),
         "–".join(f"{value:.3f}" for value in own[contestant]["ratio_spread"])]
        for model, own in summary["models"].items()
        for contestant in ("optimal", "uniform")
    ]  # fmt: skip
    columns = ["model", "policy", "raw DDP, ms a step", "ratio", "of whole blocks", "quartiles of the ratio"]
    pairs = f"{summary['blocks']} pairs of blocks of {summary['steps']} steps"
    return [
        f"Time of a step over that of raw DDP, {summary['nproc']} equal workers on {summary['device']}, {pairs}. "
        f"Goal: at most {summary['goal']}.\n",
        table(columns, rows),
    ]


def _contest(levels: Data, claim: str = "") -> list[str]:
    """The summaries of ``sync`` and ``network``."""
    rows, saved = [], []
    for level, outcome in levels.items():
        for name, own in outcome["workloads"].items():
            saved.append(1 - 1 / own["speedup_vs_uniform"])
            split = "/".join(map(str, own["oracle"]))
            rows.append(
                [level, name, own["speedup_vs_uniform"], _spread(own["speedup_vs_uniform_spread"]), _percent(saved[-1]),
                 own["fraction_of_oracle"], own["vs_best_subset"], own["vs_best_single"], own["steps_to_90"], split]
            )  # fmt: skip
    columns = ["level", "workload", "times faster than uniform", "quartiles", "less time", "of the oracle",
               "of the best subset", "of the best single worker", "steps to 0.9", "oracle's split"]  # fmt: skip
    least, most, mean = _percent(min(saved)), _percent(max(saved)), _percent(sum(saved) / len(saved))
    text = f"{least} to {most}, {mean} on average" if len(saved) > 1 else mean
    return [table(columns, rows), f"Less time than uniform: {text}{claim}.\n"]


def _noise(levels: Data) -> list[str]:
    rows = [
        [level, name, own["ddp_vs_itself"], _spread(own["ddp_vs_itself_spread"]), own.get("rounds")]
        for level, outcome in levels.items()
        for name, own in outcome["workloads"].items()
        if "ddp_vs_itself" in own
    ]
    if not rows:
        return []
    return [
        "What such a ratio is worth on this machine: uniform DDP against a second uniform DDP in the same rounds.\n",
        table(["level", "workload", "times faster than itself", "quartiles", "rounds"], rows),
    ]


def _others(levels: Data) -> list[str]:
    names = list(dict.fromkeys(p for o in levels.values() for own in o["workloads"].values() for p in own["others"]))
    rows = [
        [level, name, own["fraction_of_oracle"], *(own["others"].get(p, {}).get("fraction_of_oracle") for p in names),
         own["fraction_of_oracle"] / own["speedup_vs_uniform"]]
        for level, outcome in levels.items()
        for name, own in outcome["workloads"].items()
    ]  # fmt: skip
    return [
        "Speed as a fraction of the oracle's (*prototype*: the papers' controller, once per epoch):\n",
        table(["level", "workload", "optimal", *names, "uniform DDP"], rows),
    ]


def _sync(record: Data) -> list[str]:
    levels = record["summary"]["levels"]
    claim = CLUSTERS[cluster(record)][1]
    return [*_contest(levels, f" (the papers: {claim})"), *_noise(levels), *_others(levels), *_measured(record)]


def _network(record: Data) -> list[str]:
    links, latency = record["summary"]["links"], record["summary"].get("latency", "not limited")
    return [
        f"Latency of the links: {latency}.\n",
        *_contest(links),
        *_noise(links),
        *_others(links),
        *_measured(record),
    ]


def _dynamic(record: Data) -> list[str]:
    parts = []
    for name, own in record["summary"]["workloads"].items():
        totals = {**own["total_s"], **({"oracle": own["oracle_total_s"]} if "oracle_total_s" in own else {})}
        by_stage = ["never" if steps is None else str(steps) for steps in own["steps_to_90_by_stage"].values()]
        rows = [
            [who, total["median"], _spread([total["lower"], total["upper"]]), total["median"] / totals["ddp"]["median"]]
            for who, total in totals.items()
        ]
        load = record["summary"].get("load")
        busy = "" if load is None else f" (worker {load}'s device busy with other work)"
        turn = record["summary"].get("turn")
        how = f"All travelled together in turns of {turn} steps" if turn else "One travelled after the other"
        parts += [
            f"*{name}*, {record['summary']['steps']} steps at each of {' → '.join(record['summary']['climb'])}{busy}. "
            f"{how}. Steps after each change until 0.9 of the new oracle: {', '.join(by_stage[1:])} "
            f"(goal: {record['summary']['goal']}).\n",
            table(["contestant", "seconds", "quartiles", "of uniform's time"], rows),
        ]
    return parts + _measured(record)


def _memory(record: Data) -> list[str]:
    summary = record["summary"]
    columns = ["workload", "its share needs, MB", "it has, MB", "samples that fit", "times faster than capping",
               "quartiles", "of the speed with enough memory", "shares: enough, capped, micro-batches"]  # fmt: skip
    rows = [
        [name, own["need_mb"], own["room_mb"], own["fits"], own["gain_over_capping"],
         _spread(own["gain_over_capping_spread"]), own["of_enough_memory"], ", ".join(own["shares"].values())]
        for name, own in summary["workloads"].items()
    ]  # fmt: skip
    return [
        f"Worker {summary['worker']} of {summary['emulate']} has memory for a part of its share. *Capping* its batch "
        f"gives the rest to the others; OmniLearn computes its share in micro-batches.\n",
        table(columns, rows),
        *_measured(record),
    ]


LEARNT = 0.1
"""From which accuracy on it says something."""


def _async(record: Data) -> list[str]:
    summary = record["summary"]
    trained = [row for row in record["rows"] if "contestant" in row]
    trips = [row for row in record["rows"] if "ratio" in row]
    # Nobody has learnt anything yet in a few steps of a large model: what differs then is chance.
    learnt = any(row["accuracy_equal_samples"] > LEARNT for row in trained)

    def of_accuracy(*columns: Any) -> tuple[Any, ...]:
        return columns if learnt else ()

    rows = [
        [level, name, who, own["staleness_p95_vs_plain"],
         *of_accuracy(own["accuracy_gain_vs_plain"], _between(*own["accuracy_gain_spread"]),
                      own["accuracy_gain_equal_samples"], own["accuracy_gap_to_sync"]),
         own["samples_per_s_vs_plain"], own["samples_per_s_vs_sync"]]
        for level, outcomes in summary["levels"].items()
        for name, outcome in outcomes.items()
        for who, own in {"dynamic": outcome, **outcome["rules"]}.items()
    ]  # fmt: skip
    columns = [
        "level", "workload", "contestant", "p95 of staleness over plain's",
        *of_accuracy("points of accuracy over plain", "over seeds", "after equal samples", "points below sync"),
        "samples/s over plain's", "over sync's",
    ]  # fmt: skip
    compared = summary.get("compared", "after equal time, ends of epochs included")
    return [
        "*Plain* is asynchronous training (ASP) with equal batches, *dynamic* OmniLearn's asynchronous mode as it is. "
        + (f"Accuracy is compared {compared} " if learnt else "These are too few steps to compare accuracies ")
        + "(the papers: up to 6.9 points more than plain; our goals at HL8: half the p95 of staleness, no worse "
        "accuracy, 0.95 of the samples per second).\n",
        table(columns, rows),
        *(_trips(summary, trips) if trips else []),
        *_measured({"rows": trained}),
    ]


def _trips(summary: Data, rows: list[Data]) -> list[str]:
    return [
        "Push and pull of a gradient and parameters, workers with nothing to compute on this machine, beside the same "
        f"messages over the bare transport: {cell(summary['round_trips_vs_transport'])} of its rate (goal: 0.9)."
        f"{_sent(summary)}\n",
        table(list(rows[0]), [list(row.values()) for row in rows]),
    ]


def _between(least: float, most: float) -> str:
    """Over seeds; with one of them there is nothing between."""
    return f"{least:.2g} to {most:.2g}" if least < most else "–"


def _sent(summary: Data) -> str:
    """How it is between hosts, for records that know the difference."""
    if "sent_vs_messages" not in summary:
        return ""
    return (
        f" Where everything is sent, as between hosts: {cell(summary['sent_vs_messages'])}, and "
        f"{cell(summary['sent_vs_needed'])} of a bare loop that also applies the update and copies what has to be."
    )


def _ablation(record: Data) -> list[str]:
    summary = record["summary"]
    rows = [
        [level, variant, own["seconds_to_accuracy"], _spread(own.get("seconds_to_accuracy_spread")),
         own["seconds_per_epoch"], own["final_accuracy"], _spread(own.get("final_accuracy_spread")),
         summary["variants"][variant]]
        for level, variants in summary["levels"].items()
        for variant, own in variants.items()
    ]  # fmt: skip
    columns = ["level", "variant", f"seconds to {summary['accuracy']}", "quartiles", "seconds per epoch",
               "final accuracy", "quartiles", ""]  # fmt: skip
    return [
        f"{summary.get('workload', 'A small CNN on the digits')}; at most {summary['epochs']} epochs, "
        f"{summary['seeds']} seeds. Left out: {summary['left_out']}.\n",
        table(columns, rows),
    ]


def _control(record: Data) -> list[str]:
    summary = record["summary"]
    timed = [
        [row["measured"], row["median"], _spread([row["lower"], row["upper"]]), row["goal"]]
        for row in record["rows"]
        if "goal" in row
    ]
    quality = [
        [row["cluster"], row["policy"], row["fraction_of_oracle"], row["replans_to_97"]]
        for row in record["rows"]
        if "cluster" in row
    ]
    climbs = [row for row in record["rows"] if "climb" in row]
    return [
        f"Deciding alone, for {summary['workers']:,} workers:\n",
        table(["measured", "median", "quartiles", "goal"], timed),
        f"Simulated from measured curves with {_percent(summary['noise'])} noise, from a uniform start:\n",
        table(["cluster", "policy", "of the oracle", "re-plans to 0.97"], quality),
        *(_climbs(summary, climbs) if climbs else []),
    ]


def _climbs(summary: Data, rows: Sequence[Data]) -> list[str]:
    columns = ["climb", "policy", "of the oracle", "quartiles", "steps to 0.9, level by level", "levels on which never"]
    return [
        f"Simulated climbs HL1 → 2 → 4 → 8 → 4 → 2 → 1, {summary['steps']} steps at each level:\n",
        table(columns, ([row["climb"], row["policy"], row["fraction_of_oracle"], _spread([row["lower"], row["upper"]]),
                         row["steps_to_90"], _percent(row["never"])] for row in rows)),
    ]  # fmt: skip


def _measured(record: Data) -> list[str]:
    columns = list(record["rows"][0])
    rows = table(columns, ([row[column] for column in columns] for row in record["rows"]))
    return ["<details><summary>All rows</summary>\n", rows, "</details>\n"]


def _events(record: Data) -> list[str]:
    short, rows = record["summary"], record["rows"]
    columns = ["part", "us_per_step_median", "us_per_step_lower", "us_per_step_upper", "bytes_per_step"]
    return [
        f"Microseconds that events add to a step ({short['device']}), and what they leave on the disk. Goal: at most "
        f"{100 * short['goal']:g}% of the step time, which holds for steps from "
        f"{short['shortest_step_ms_within_goal']:.1f} ms on.\n",
        table(columns, ([row[column] for column in columns] for row in rows)),
    ]


def _overlap(record: Data) -> list[str]:
    rows = [
        [row["link"], row["contestant"], row["step_ms"], row["ratio"], _spread([row["lower"], row["upper"]])]
        for row in record["rows"]
    ]
    return [
        f"Step time of a worker whose gradients ({record['summary']['parameters']:,} numbers) leave during the "
        f"backward pass, over that of the same worker when they leave at `optimizer.step()`. A backward pass takes "
        f"about as long as a gradient needs on the link.\n",
        table(["link", "gradients leave", "step ms", "ratio", "quartiles"], rows),
    ]


SECTIONS: dict[str, tuple[str, Callable[[Data], list[str]]]] = {
    "sync": ("Synchronous training", _sync),
    "async": ("Asynchronous training", _async),
    "overlap": ("Sending while computing", _overlap),
    "dynamic": ("A cluster that changes", _dynamic),
    "memory": ("What memory costs", _memory),
    "network": ("Slow links", _network),
    "overhead": ("Cost on equal machines", _overhead),
    "events": ("What events cost", _events),
    "ablation": ("What each part is worth", _ablation),
    "control": ("Decisions", _control),
}
