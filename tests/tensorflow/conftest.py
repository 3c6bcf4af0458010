"""Three TensorFlow workers for all tests of this folder; skipped where TensorFlow is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.conftest import _kept
from tests.tensorflow.gang import Gang

collect_ignore_glob = [] if find_spec("tensorflow") else ["test_*.py"]


@pytest.fixture(scope="session")
def _workers() -> Iterator[Gang]:
    gang = Gang()
    yield gang
    gang.close()


@pytest.fixture
def workers(_workers: Gang) -> Iterator[Gang]:
    """``workers.run("function", …)`` runs a function of ``work.py`` on three ranks."""
    yield _workers
    _kept.update(process.pid for process, _ in _workers.members)
