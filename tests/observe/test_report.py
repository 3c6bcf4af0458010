"""The report: its words are true, everything readable is shown, whatever the files contain, and text stays text."""

from __future__ import annotations

import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.observe.made import async_run, long_run, sync_run

from omnilearn import cli
from omnilearn.errors import OmniLearnError, UsageError
from omnilearn.observe import EventLog, report
from omnilearn.observe.report import summary
from omnilearn.observe.report.load import load
from omnilearn.observe.report.page import page

VOID = {"meta", "link", "br"}


class Tags(HTMLParser):
    """Which elements there are; fails where they are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    tags.close()
    assert not tags.open
    assert not {tag for tag, _ in tags.seen} & {"script", "iframe", "object", "img"}
    sources = [value for tag, attrs in tags.seen for name, value in attrs.items() if name in ("href", "src")]
    assert sources == ["data:,"], "nothing comes from elsewhere"
    assert not re.search(r'[\s",(]nan\b', re.sub(r">[^<]*<", "><", text)), "no coordinate is missing"
    return tags


def headings(tags_text: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", tags_text)


def test_one_run(tmp_path: Path) -> None:
    text = page([load(sync_run(tmp_path / "run", 4, 400, park=True))])
    tags = parsed(text)
    assert headings(text) == [
        "Batch per worker", "Where time went", "A few steps", "Compute time by batch",
        "Distribution of compute times", "Samples per second", "Loss",
    ]  # fmt: skip
    assert "Four workers on one machine (PyTorch, synchronous, policy optimal)" in tags.text
    assert "128 samples per step, 400 steps" in tags.text
    assert "Measured: 2.6 times as fast as with equal batches" in tags.text
    assert "last at step 200; at the end they were parked, 15, 20, 93." in tags.text
    marks = [attrs["class"] for tag, attrs in tags.seen if tag == "g"]
    assert marks == ["mark plan", "mark parking"] * 2  # for wide and narrow screens


def test_equal_batches_that_were_kept_are_no_gain(tmp_path: Path) -> None:
    """Others were tried for some steps, and the first steps are slow anyway: no reason to speak of a gain."""
    folder = sync_run(tmp_path / "run", 4, 400)
    path = folder / "rank-0.jsonl"
    made = [json.loads(line) for line in path.read_text().splitlines()]
    plans = [event for event in made if event["kind"] == "plan"]
    back = {**plans[1], "step": 40, "batches": plans[0]["batches"], "reason": "rebalance", "t": plans[1]["t"] + 0.1}
    made.insert(made.index(plans[1]) + 1, back)
    path.write_text("".join(json.dumps(event) + "\n" for event in made))
    said = parsed(page([load(folder)])).text
    assert "there was nothing to gain against that" in said
    assert "times as fast as with equal batches" not in said


def test_a_gain_that_was_not_measured_is_called_predicted(tmp_path: Path) -> None:
    folder = sync_run(tmp_path / "run", 4, 400)
    path = folder / "rank-0.jsonl"
    path.write_text(path.read_text().replace('"batches": [32, 32, 32, 32]', '"batches": [30, 32, 32, 34]'))
    run = load(folder)
    found = summary.gain(run)
    assert found is not None
    assert found.how == "predicted"
    assert found.times == pytest.approx((0.004 / 0.5**0.5 + 0.002 / 0.5 * 32) / 0.0455, rel=0.15)
    assert "Predicted, not measured: " in parsed(page([run])).text
    run.equal_time = None
    assert summary.gain(run) is None
    assert "is not known" in parsed(page([run])).text


def test_runs_side_by_side(tmp_path: Path) -> None:
    runs = [sync_run(tmp_path / "uniform", 4, 300, uniform=True), sync_run(tmp_path / "omni", 4, 300)]
    problems = report.write(runs, tmp_path / "out" / "report.html")
    assert problems == []
    text = (tmp_path / "out" / "report.html").read_text()
    tags = parsed(text)
    assert "'omni' was 2.5 times as fast as equal batches, measured" in tags.text
    assert "Every worker had the same batch all the time" in tags.text
    for heading in ("Batch per worker", "Where time went", "A few steps", "Distribution of compute times"):
        section = text[text.index(f"<h2>{heading}</h2>") :].split("</section>")[0]
        assert section.count("<h3>") == 2, heading


def test_time_to_a_target_decides(tmp_path: Path) -> None:
    for name, seconds in (("uniform", 24.0), ("omni", 10.0)):
        folder = sync_run(tmp_path / name, 2, 60, uniform=name == "uniform")
        log = EventLog(folder, 0)
        log.write("metric", epoch=1, seconds=seconds, accuracy=0.97, reached=True)
        log.close()
    runs = [load(tmp_path / name) for name in ("uniform", "omni")]
    for run in runs:
        run.metrics[-1]["t"] = run.began + 5
    found = summary.gain(runs[1], runs[:1])
    assert found is not None
    assert (round(found.times, 2), found.how) == (2.4, "measured")
    assert "<h2>Accuracy</h2>" in page(runs)


def test_an_asynchronous_run(tmp_path: Path) -> None:
    text = page([load(async_run(tmp_path / "run", 4, 20.0))])
    tags = parsed(text)
    assert {"Updates per worker", "Staleness"} <= set(headings(text))
    assert "A few steps" not in headings(text)
    assert "asynchronous" in tags.text
    assert "Out of memory once." in tags.text
    assert "worker 1 ran out of memory with 24 samples at once; went on with 12" in tags.text


@pytest.mark.parametrize("workers", [1, 2, 9, 64])
def test_any_number_of_workers(tmp_path: Path, workers: int) -> None:
    text = page([load(sync_run(tmp_path / "run", workers, 200, park=workers > 1))])
    parsed(text)
    assert len(text) < 2e6


def test_a_long_run_gives_a_small_page(tmp_path: Path) -> None:
    run = load(long_run(tmp_path / "run", 32, 100_000))
    assert run.steps == 100_000
    text = page([run])
    parsed(text)
    assert len(text) < 2e6
    assert "in the beginning" in text


def test_where_single_steps_are_not_kept_a_typical_one_is_shown(tmp_path: Path) -> None:
    text = page([load(sync_run(tmp_path / "run", 2, 2000, park=True))])
    parsed(text)
    assert re.search(
        r"Before, with the plan of step 0: [\d.]+ ms per step on average \(steps as they were measured\)", text
    )
    assert re.search(
        r"After, with the plan of step 1,000: [\d.]+ ms per step on average \(a typical step, repeated\)", text
    )


# Whatever the files contain


def test_text_from_runs_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"
    folder = tmp_path / "<b>run"
    log = EventLog(folder, 0)
    workers = [{"cores": None, "device": evil, "device_name": evil, "host": evil}] * 2
    log.write("run", mode=evil, backend=evil, options={"policy": evil, "global_batch": 8}, workers=workers)
    log.write("plan", step=0, batches=[4, 4], parked=[], reason=evil)
    log.write("plan", step=2, batches=[5, 3], parked=[], reason=evil)
    for rank in range(2):
        log.write("steps", worker=rank, step=0, batch=[4] * 4, busy=[0.1] * 4, wait=[0.1] * 4, loss=[1.0] * 4)
    log.write("metric", **{evil: 0.5, "seconds": 1.0})
    log.write("fault", what=evil, detail=evil, step=1)
    log.write("checkpoint", what=evil, path=evil)
    log.write("end", ok=False, error=evil)
    log.close()
    tags = parsed(page([load(folder), load(folder)], [evil]))
    assert tags.text.count("<script>alert(1)</script>") > 8


def test_an_empty_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-0.jsonl").write_text("")
    assert cli.main(["report", str(tmp_path), "-o", str(tmp_path / "r.html")]) == 0
    err = capsys.readouterr().err
    assert "has no steps: it ended, or was looked at, before the first" in err
    assert "has no description of the run" in parsed((tmp_path / "r.html").read_text()).text


def test_a_cut_off_and_a_foreign_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = sync_run(tmp_path / "run", 3, 100)
    (folder / "rank-0.jsonl").write_bytes((folder / "rank-0.jsonl").read_bytes()[:-300])
    (folder / "rank-1.jsonl").write_bytes(bytes(range(256)) * 40)
    (folder / "rank-2.jsonl").open("a").write('{"v": 2, "kind": "end", "t": 1, "rank": 2}\n')
    assert cli.main(["report", str(folder), "-o", str(tmp_path / "r.html")]) == 0
    err = capsys.readouterr().err
    assert "are no events, or were cut off" in err
    assert "format 2; this OmniLearn reads format 1: upgrade it (the others are shown)" in err
    text = (tmp_path / "r.html").read_text()
    assert "Batch per worker" in headings(text)
    assert "upgrade it" in parsed(text).text


def test_nothing_to_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "r.html"
    assert cli.main(["report", str(tmp_path / "missing"), "-o", str(output)]) == 2
    (tmp_path / "notes").mkdir()
    assert cli.main(["report", str(tmp_path / "notes"), "-o", str(output)]) == 2
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "rank-0.jsonl").write_text('{"v": 9, "kind": "end", "t": 1, "rank": 0}\n')
    assert cli.main(["report", str(tmp_path / "newer"), "-o", str(output)]) == 2
    err = capsys.readouterr().err.splitlines()
    assert "there is no folder" in err[0]
    assert "there are no events in" in err[1]
    assert "reads format 1: upgrade it" in err[2]
    assert not output.exists()


def test_one_bad_run_of_several(tmp_path: Path) -> None:
    good = sync_run(tmp_path / "good", 2, 60)
    (tmp_path / "bad").mkdir()
    problems = report.write([good, tmp_path / "bad"], tmp_path / "r.html")
    assert "there are no events in" in problems[0]
    assert "there are no events in" in parsed((tmp_path / "r.html").read_text()).text
    with pytest.raises(UsageError):
        report.write([tmp_path / "bad"], tmp_path / "r.html")


def test_a_restart_and_a_crash_are_said(tmp_path: Path) -> None:
    folder = sync_run(tmp_path / "run", 2, 60)
    log = EventLog(folder, 0)
    log.write("run", mode="sync", options={"global_batch": 8}, workers=[{}, {}])
    log.write("plan", step=0, batches=[4, 4], parked=[], reason="start")
    log.write("steps", step=0, batch=[4] * 3, busy=[0.1] * 3, wait=[0.1] * 3)
    log.close()
    run = load(folder)
    assert run.steps == 3
    assert any("was started 2 times" in problem for problem in run.problems)
    assert any("has no end: it is still running, or was killed" in problem for problem in run.problems)
    parsed(page([run]))


def test_an_unwritable_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OmniLearnError, match="choose another path with -o"):
        report.write([sync_run(tmp_path / "run", 1, 20)], tmp_path / "file" / "report.html")


ODD: tuple[Any, ...] = (None, "x", -1, 0, 1e300, [], [None], {}, True, [1, "a"], [[1]], 0.5, -3.5)


@pytest.mark.parametrize("seed", range(12))
def test_damaged_events_never_break_the_page(tmp_path: Path, seed: int) -> None:
    """Fields replaced at random, by anything: what is left is shown."""
    rng = random.Random(seed)
    folder = (sync_run if seed % 2 else async_run)(tmp_path / "run", 3, *([80] if seed % 2 else [4.0]))
    for path in folder.iterdir():
        lines = []
        for line in path.read_text().splitlines():
            event = json.loads(line)
            for name in list(event):
                if rng.random() < 0.08 and name not in ("v", "kind"):
                    event[name] = rng.choice(ODD)
                elif isinstance(event[name], list) and event[name] and rng.random() < 0.05:
                    event[name][rng.randrange(len(event[name]))] = rng.choice(ODD)
            lines.append(json.dumps(event))
        path.write_text("\n".join(lines))
    try:
        run = load(folder)
    except UsageError:
        return
    parsed(page([run]))
