"""The report in a real browser: no errors, every figure drawn and inside the page, at laptop and phone width."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from tests.observe.made import async_run, sync_run

from omnilearn.observe import report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome (apt-get install chromium)")

PROBE = """<script>
const errors = [];
addEventListener("error", e => errors.push(String(e.message)));
addEventListener("load", () => {
  const shown = [...document.querySelectorAll("svg")].map(svg => {
    const box = svg.getBoundingClientRect();
    const drawn = [...svg.querySelectorAll("rect, circle, .line, .band")].map(e => e.getBoundingClientRect());
    return {name: svg.ariaLabel, width: box.width, height: box.height, left: box.left, right: box.right,
            drawn: drawn.length, out: drawn.filter(b => b.right > box.right + 2 || b.left < box.left - 2).length};
  }).filter(s => s.width > 0);
  const out = document.createElement("pre");
  out.id = "probe";
  out.textContent = JSON.stringify({errors, shown, page: document.documentElement.scrollWidth, window: innerWidth,
    dark: matchMedia("(prefers-color-scheme: dark)").matches, back: getComputedStyle(document.body).backgroundColor});
  document.body.append(out);
});
</script>"""


def look(page: Path, width: int, dark: bool = False) -> dict[str, Any]:
    """Open a copy of the page that measures itself; what it measured."""
    text = page.read_text()
    policy = re.search(r'<meta http-equiv="Content-Security-Policy"[^>]*>', text)
    assert policy is not None
    copy = page.with_name(f"probe-{width}.html")
    copy.write_text(text.replace(policy[0], PROBE))
    assert BROWSER is not None
    # Chromium's window is never narrower than 500 pixels, so a phone is a frame in it.
    if width < 500:
        inner, copy = copy, page.with_name("frame.html")
        copy.write_text(
            f'<iframe src="{inner.name}" style="width:{width}px;height:3000px;border:0"></iframe><script>'
            "addEventListener('load', () => document.body.append("
            "document.querySelector('iframe').contentDocument.getElementById('probe').cloneNode(true)))</script>"
        )
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += [f"--user-data-dir={page.parent / 'profile'}", f"--window-size={max(width, 500)},3000"]
    command += ["--enable-logging=stderr", "--v=0", "--no-first-run", "--disable-extensions"]
    command += ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run(
        [*command, "--dump-dom", copy.as_uri()], capture_output=True, text=True, timeout=60, check=False
    )
    assert ":CONSOLE" not in done.stderr, done.stderr
    probe = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.S)
    assert probe is not None, done.stdout[-500:] + done.stderr[-2000:]
    result: dict[str, Any] = json.loads(unescape(probe[1]))
    return result


def check(seen: dict[str, Any], figures: list[str], width: int) -> None:
    assert seen["errors"] == []
    assert seen["window"] == width
    assert seen["page"] <= width, "nothing is wider than the page"
    names = [figure["name"] for figure in seen["shown"]]
    assert [name for name in figures if not any(str(shown).startswith(name) for shown in names)] == []
    for figure in seen["shown"]:
        assert figure["drawn"] > 0, figure
        assert figure["out"] == 0, figure
        assert figure["height"] > 40, figure
        assert figure["left"] >= 0, figure
        assert figure["right"] <= width, figure


ONE = [
    "Batch per worker", "Computing and waiting per worker", "Before, with the plan", "After, with the plan",
    "Compute time by batch", "Distribution of compute times", "Samples per second", "Loss",
]  # fmt: skip


def test_one_run_on_a_laptop_and_a_phone(tmp_path: Path) -> None:
    report.write([sync_run(tmp_path / "run", 4, 300, park=True)], tmp_path / "report.html")
    wide, narrow = look(tmp_path / "report.html", 1280), look(tmp_path / "report.html", 390)
    check(wide, ONE, 1280)
    check(narrow, ONE, 390)
    assert (wide["dark"], wide["back"]) == (False, "rgb(255, 255, 255)")
    assert narrow["shown"][0]["width"] == pytest.approx(350, abs=15), "drawn for this width, not scaled down"


def test_many_workers_in_the_dark(tmp_path: Path) -> None:
    report.write([sync_run(tmp_path / "run", 64, 120, park=True)], tmp_path / "report.html")
    seen = look(tmp_path / "report.html", 1280, dark=True)
    check(seen, ONE, 1280)
    assert (seen["dark"], seen["back"]) == (True, "rgb(18, 22, 28)")


def test_several_runs_also_asynchronous(tmp_path: Path) -> None:
    runs = [sync_run(tmp_path / "ddp", 4, 200, uniform=True), sync_run(tmp_path / "omni", 4, 200)]
    report.write([*runs, async_run(tmp_path / "async", 4, 10.0)], tmp_path / "report.html")
    check(look(tmp_path / "report.html", 1280), [*ONE, "Updates per worker", "Staleness"], 1280)
    check(look(tmp_path / "report.html", 390), [*ONE, "Updates per worker", "Staleness"], 390)
