"""Which log folder is meant? The last one below ``runs/`` where none is named."""

from __future__ import annotations

from pathlib import Path

from omnilearn.errors import UsageError


def find(name: str | None) -> Path:
    """The folder with the events: as named, or below ``runs/``. One with nothing but runs inside gives the last."""
    if name is None:
        return _last(Path("runs")) or _none("there are no runs below runs/: give the log folder of one")
    for folder in (Path(name), Path("runs") / name):
        if folder.is_dir():
            return folder if _has_events(folder) else _last(folder) or folder
    raise UsageError(f"there is no folder {name}: give the log folder of a run, such as runs/20261115-053049")


def _last(folder: Path) -> Path | None:
    """The newest run below a folder, one or two levels down."""
    found = [path.parent for pattern in ("*/rank-*.jsonl", "*/*/rank-*.jsonl") for path in folder.glob(pattern)]
    return max(found, key=lambda path: max(f.stat().st_mtime for f in path.glob("rank-*.jsonl")), default=None)


def _has_events(folder: Path) -> bool:
    return any(folder.glob("rank-*.jsonl"))


def _none(message: str) -> Path:
    raise UsageError(message)
