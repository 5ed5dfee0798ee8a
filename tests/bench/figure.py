"""Takes samples of several ways to do a thing in turn, so that noise falls on all of them alike, and prints them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Samples:
    """Seconds, in the order taken."""

    name: str
    seconds: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.seconds) * 1e3

    @property
    def maximum_ms(self) -> float:
        return max(self.seconds) * 1e3


def interleaved(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Samples]:
    """Run every way once a round; one round before them warms the caches and is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            if turn:
                taken[name].append(time.perf_counter() - begin)
    return {name: Samples(name, tuple(seconds)) for name, seconds in taken.items()}


def line(text: str, value: str, goal: str, met: bool) -> bool:
    """Print one figure beside its goal; returns `met`."""
    print(f"{'ok  ' if met else 'MISS'} {text}: {value} (goal {goal})")
    return met
