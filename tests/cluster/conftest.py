from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster_helpers import leftovers


@pytest.fixture(autouse=True)
def nothing_left_on_the_machine() -> Iterator[None]:
    """Fail a test after which a control group, a namespace, a link or a folder of ours is left."""
    before = set(leftovers())
    yield
    left = set(leftovers()) - before
    assert not left, f"left behind: {sorted(left)}"
