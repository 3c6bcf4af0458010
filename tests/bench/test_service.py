"""What a benchmark's worker does beside training."""

from __future__ import annotations

from pathlib import Path

from omnilearn.bench.service import Member


class Counting(Member):
    def __init__(self) -> None:
        super().__init__(rank=1, size=2)
        self.set_to: list[int] = []

    def set_threads(self, count: int) -> None:
        self.set_to.append(count)


def test_a_worker_follows_the_number_of_threads_it_is_told(tmp_path: Path) -> None:
    told, worker = tmp_path / "threads", Counting()
    worker.follow()  # nobody has told it anything yet
    told.write_bytes(bytes([1, 3]))
    worker.ready([], told)
    worker.follow()
    assert worker.set_to == [3]
    with told.open("r+b") as file:
        file.write(bytes([4, 2]))
    worker.follow()
    worker.follow()
    assert worker.set_to == [3, 2]
