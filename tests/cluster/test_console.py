"""The terminal: pieces become lines, tracebacks wait."""

from __future__ import annotations

import io
import sys

import pytest

from omnilearn.cluster.console import Stream, console


def test_pieces_of_different_ranks_become_whole_lines() -> None:
    target = io.StringIO()
    stream = Stream(target, hold=False)
    for piece in ("[rank 0] a", "[rank 1] b\n", "[rank 0] c\n", "[rank 2] no end", "not from a worker\n"):
        stream.write(piece)
    assert target.getvalue() == "[rank 1] b\n[rank 0] ac\nnot from a worker\n"
    stream.end()
    assert target.getvalue().endswith("[rank 2] no end\n")


def test_tracebacks_are_shown_late_unless_the_run_fails() -> None:
    target = io.StringIO()
    stream = Stream(target, hold=True)
    stream.write("[rank 0] Traceback (most recent call last):\n")
    stream.write("[rank 0] ValueError: x\n")
    stream.write("[rank 1] fine\n")
    stream.release(60)
    assert target.getvalue() == "[rank 1] fine\n"
    stream.release(0)
    assert target.getvalue().endswith("[rank 0] ValueError: x\n")


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_held_is_seen_at_the_end_of_a_good_run_only(fails: bool) -> None:
    out, err = io.StringIO(), io.StringIO()
    try:
        with console(out, err):
            sys.stderr.write("[rank 0] [rank0]: Traceback (most recent call last):\n")
            if fails:
                raise RuntimeError
    except RuntimeError:
        assert fails
    assert ("Traceback" in err.getvalue()) is not fails
