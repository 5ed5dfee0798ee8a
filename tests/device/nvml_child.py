"""A process like kvmpoold's device side: NVML is found by soname as on a real host. Commands on stdin, JSON on stdout.

inventory | probe CARD DEADLINE | signals (from then on, beside the answers) | tick (answers when the loop is free)
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from kvmpool.core.model import CardId
from kvmpool.device.cards import SystemCards
from kvmpool.device.health_source import SystemHealthSource
from kvmpool.errors import KvmpoolError
from tests.device.trees import SystemClock


def say(kind: str, value: object) -> None:
    print(json.dumps([kind, time.monotonic(), value], default=lambda enum: enum.value), flush=True)


async def answer(cards: SystemCards, words: list[str]) -> None:
    try:
        match words:
            case ["inventory"]:
                say("inventory", [asdict(card) for card in await cards.inventory()])
            case ["probe", card, deadline]:
                signal = await cards.probe(CardId(card), float(deadline))
                say("probe", {"type": type(signal).__name__, **asdict(signal)})
            case ["tick"]:
                say("tick", None)
    except KvmpoolError as error:
        say("error", f"{type(error).__name__}: {error}")


async def tell_signals(source: SystemHealthSource) -> None:
    async for signal in source.signals():
        say("signal", {"type": type(signal).__name__, **asdict(signal)})


async def main(root: Path, use_log: bool) -> None:
    clock = SystemClock()
    cards = SystemCards(clock, root=root, match=("10de:*",))
    source = SystemHealthSource(cards, clock, kernel_log=root / "kmsg" if use_log else None, udev_source="")
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    tasks = []
    while line := await reader.readline():
        words = line.decode().split()
        work = tell_signals(source) if words == ["signals"] else answer(cards, words)
        tasks.append(asyncio.ensure_future(work))
    await source.close()


asyncio.run(main(Path(sys.argv[1]), sys.argv[2] == "log"))
