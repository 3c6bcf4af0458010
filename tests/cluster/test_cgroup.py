"""Control groups of version 2, which this machine may not have: the same logic on a folder that looks like them."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnilearn.cluster import cgroup


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A v2 mount with this process in /a/b; /a hands cpu and memory down."""
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    for place, handed in ((tmp_path, "cpu memory"), (tmp_path / "a", "cpu memory"), (inner, "")):
        (place / "cgroup.controllers").write_text("cpu memory")
        (place / "cgroup.subtree_control").write_text(handed)
    (tmp_path / "a" / "cpu.max").write_text("150000 100000")
    (inner / "cpu.max").write_text("max 100000")
    (inner / "memory.max").write_text("max")
    (tmp_path / "a" / "memory.max").write_text("1000000")
    files = {
        "/proc/self/mountinfo": f"30 20 0:26 / {tmp_path} rw - cgroup2 cgroup2 rw",
        "/proc/self/cgroup": "0::/a/b",
    }
    real = cgroup.read
    monkeypatch.setattr(cgroup, "read", lambda path: files.get(str(path)) or real(path))
    return tmp_path


def test_v2_limits_are_the_smallest_on_the_way_up(tree: Path) -> None:
    assert cgroup.cpu_limit() == 1.5
    assert cgroup.memory_limit() == 1_000_000


def test_v2_groups_are_made_where_the_controller_is_handed_down(tree: Path) -> None:
    parents = cgroup.parents(["cpu", "memory"])
    parent = tree / "a"
    assert parents == {"cpu": parent, "memory": parent}
    group = cgroup.Group("omnilearn-test", parents)
    assert group.doors == [str(parent / "omnilearn-test" / "cgroup.procs")]
    for file in ("cpu.max", "memory.max", "memory.swap.max"):
        (parent / "omnilearn-test" / file).touch()
    group.set_cpu(0.15)
    group.set_memory(5000)
    assert (parent / "omnilearn-test" / "cpu.max").read_text() == "1500 10000"
    assert (group.cpu, group.memory) == (0.15, 5000)
    group.set_cpu(0.02)
    assert (parent / "omnilearn-test" / "cpu.max").read_text() == "1000 50000"
    (parent / "omnilearn-test" / "memory.events").write_text("oom 1\noom_kill 2")
    assert group.out_of_memory == 2
    assert list(cgroup.all_groups("omnilearn-")) == [parent / "omnilearn-test"]


def test_v2_a_group_above_is_told_to_hand_down_but_never_our_own(tree: Path) -> None:
    for place in (tree, tree / "a", tree / "a" / "b"):
        (place / "cgroup.subtree_control").write_text("")
        (place / "cgroup.type").write_text("domain")
    assert cgroup.parents(["cpu", "memory"]) == dict.fromkeys(["cpu", "memory"], tree / "a")
    assert (tree / "a" / "cgroup.subtree_control").read_text() == "+cpu +memory"
    assert (tree / "a" / "b" / "cgroup.subtree_control").read_text() == ""


def test_v2_places_whose_groups_take_no_processes_are_passed_over(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "_can_hold_processes", lambda place: place == tree)
    assert cgroup.parents(["cpu"]) == {"cpu": tree}
    monkeypatch.setattr(cgroup, "_can_hold_processes", lambda place: False)
    assert cgroup.parents(["cpu", "memory"]) == {}
