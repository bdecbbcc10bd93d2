"""A client process that dies at a fault point: `python -m tests.client.dying_client URL STATE LEDGER POINT COUNT`.

It writes each push of its tool and each handled event into the ledger, outside of midstream's files.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from midstream.client import connect
from midstream.environment import Fault
from midstream.testing.fake_worlds import KillingWorld
from midstream.tools.function_tools import Tool, tool


def push_tool(ledger: Path) -> Tool:
    """Return the tool whose effects the ledger holds."""

    @tool
    def push(button: str) -> str:
        """Push a button."""
        note(ledger, f"pushed {button}")
        return f"pushed {button}"

    return push


def note(ledger: Path, line: str) -> None:
    with ledger.open("a") as file:
        file.write(f"{line}\n")


async def main(url: str, state: str, ledger: Path, point: str, count: str) -> None:
    world = KillingWorld(Fault(point), int(count))
    keyring = "KEYRING_PROPERTY_PATH" in os.environ
    async with connect(url, state=state, keyring=keyring, tools=[push_tool(ledger)], world=world) as client:
        async for event in client.send("s1", "push it"):
            note(ledger, f"saw {event.id}")
    note(ledger, "lived")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4], sys.argv[5]))
