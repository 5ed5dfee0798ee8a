"""A process like kvmpoold's libvirt side, inside a lab host. Commands as JSON lines on stdin, answers on stdout.

["domains"] | ["listen"] | ["add", DOMAIN, ATTRIBUTES] | ["remove", DOMAIN, CLAIM] | ["tick"]
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from kvmpool.errors import KvmpoolError
from kvmpool.virt.connection import Libvirt


def say(kind: str, value: object) -> None:
    print(json.dumps([kind, time.monotonic(), value]), flush=True)


async def answer(hypervisor: Libvirt, command: list[Any]) -> None:
    try:
        match command:
            case ["domains"]:
                seen = await hypervisor.domains()
                say("domains", [[d.name, d.running, d.state, [c.name for c in d.claims], d.claims_error] for d in seen])
            case ["add", domain, attributes]:
                await hypervisor.add_claim(domain, attributes)
                say("add", "done")
            case ["remove", domain, claim]:
                await hypervisor.remove_claim(domain, claim)
                say("remove", "done")
            case ["listen"]:
                async for reason in hypervisor.wakeups():
                    say("wake", reason)
            case ["tick"]:
                say("tick", "done")
    except KvmpoolError as error:
        say(command[0], f"{type(error).__name__}: {error}")


async def main() -> None:
    hypervisor = Libvirt("qemu:///system")
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    tasks = []
    while line := await reader.readline():
        tasks.append(asyncio.ensure_future(answer(hypervisor, json.loads(line))))
    await hypervisor.close()


asyncio.run(main())
