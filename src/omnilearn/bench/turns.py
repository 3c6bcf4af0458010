"""In which order contestants take their turns: nobody comes always early, or always after the same other one.

Who was there before matters: workers that just computed alone have left the others with cold caches.
"""

from __future__ import annotations

from collections.abc import Sequence


def order(contestants: Sequence[str], turn: int) -> list[str]:
    """The order of one round: a row of a Williams design.

    In as many rounds as there are contestants (twice as many where that number is odd) everybody comes equally often at
    every place, and equally often right after every other.

    >>> [order("abcd", turn) for turn in range(3)]
    [['a', 'b', 'd', 'c'], ['b', 'c', 'a', 'd'], ['c', 'd', 'b', 'a']]
    """
    count = len(contestants)
    zigzag = [(k + 1) // 2 if k % 2 else -(k // 2) for k in range(count)]  # 0, 1, -1, 2, -2, …
    if count % 2 and turn // count % 2:
        zigzag.reverse()
    return [contestants[(place + turn) % count] for place in zigzag]
