"""Records have one shape, are written whole or not at all, and name neither a host nor a path."""

from __future__ import annotations

import builtins
import io
import json
import platform
import stat
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

import omnilearn
from omnilearn.bench.record import Record, command_line, machine, median_and_spread, table
from omnilearn.errors import OmniLearnError


def record() -> Record:
    rows = [{"name": "a", "ms": 1.5}, {"name": "b", "ms": float("inf")}, {"other": np.int64(3), "on": True}]
    return Record("test", rows, {"ms": np.float64(1.5), "list": (1, 2), "never": None})


def test_shape(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folders" / "r.json"
    record().write(path)
    read = json.loads(path.read_text())
    assert set(read) == {"schema", "bench", "command", "version", "date", "machine", "summary", "rows"}
    assert (read["schema"], read["bench"], read["version"]) == (1, "test", omnilearn.__version__)
    assert datetime.fromisoformat(read["date"]).utcoffset() == timedelta(0)
    assert read["rows"] == [{"name": "a", "ms": 1.5}, {"name": "b", "ms": None}, {"other": 3, "on": True}]
    assert read["summary"] == {"ms": 1.5, "list": [1, 2], "never": None}


def test_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    record().write(path)
    before = path.read_text()
    with pytest.raises(TypeError):
        Record("test", [{"value": object()}], {}).write(path)
    assert path.read_text() == before
    record().write(path)
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OmniLearnError, match=r"cannot write .*file.r\.json.*--json"):
        record().write(tmp_path / "file" / "r.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OmniLearnError, match=r"cannot write .*folder"):
        record().write(tmp_path / "folder")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


def test_the_machine_without_its_name() -> None:
    here = machine()
    assert {"cpu", "cores", "memory_gib", "gpu", "python", "numpy", "torch"} <= set(here)
    assert here["cores"] >= 1
    assert here["numpy"] == np.__version__
    text = json.dumps(here)
    assert str(Path.home()) not in text
    assert not platform.node() or platform.node() not in text


def test_describing_the_machine_imports_no_framework() -> None:
    code = "import sys; from omnilearn.bench.record import machine; machine(); print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "False"


def test_the_command_without_paths(tmp_path: Path) -> None:
    words = ["bench", "control", "--quick", "--json", str(tmp_path / "r.json")]
    assert command_line(words) == "omnilearn bench control --quick --json r.json"
    assert command_line(["bench", "--json", "docs/r.json"]) == "omnilearn bench --json docs/r.json"


def test_median_and_spread() -> None:
    assert median_and_spread([5.0]) == {"median": 5, "lower": 5, "upper": 5}
    assert median_and_spread(range(1, 6)) == {"median": 3, "lower": 2, "upper": 4}
    assert median_and_spread([1, 1, 1, 100])["median"] == 1


@pytest.mark.parametrize("rich", [True, False])
def test_tables(rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not rich:
        real = builtins.__import__

        def without_rich(name: str, *args: object, **kwargs: object) -> object:
            if name.split(".")[0] == "rich":
                raise ImportError(name)
            return real(name, *args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(builtins, "__import__", without_rich)
    out = io.StringIO()
    table(["some_name", "ms"], [["[a] long name " * 3, 1.23456], ["b", None], ["c", 12345]], file=out)
    lines = out.getvalue().splitlines()
    assert any("some name" in line and line.rstrip().endswith("ms") for line in lines)
    assert any("[a] long name" in line and line.rstrip().endswith("1.23") for line in lines)
    assert any(line.strip().startswith("b") and line.rstrip().endswith("–") for line in lines)
    assert any(line.rstrip().endswith("12,345") for line in lines)


def test_rows_of_one_kind_make_one_table() -> None:
    out = io.StringIO()
    record().show(out)
    assert out.getvalue().count("name") == 1
    assert out.getvalue().count("other") == 1


def test_what_there_was_is_kept_when_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    record().keep(path)
    assert json.loads(path.read_text())["summary"] == {"ms": 1.5, "list": [1, 2], "never": None, "unfinished": True}
    record().write(path)
    assert "unfinished" not in json.loads(path.read_text())["summary"]
    record().keep(None)
