"""A client process for the whole soak: `python -m tests.soak.soak_client FOLDER PORT`.

`turns COUNT` runs turns in new sessions, `AT_ONCE` at a time. The client itself resends the unfinished work
of a killed server.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from midstream.client import connect
from midstream.tools.function_tools import tool
from tests.fault.fault_client_process import HastyWorld
from tests.soak.gauges import answer_commands

AT_ONCE = 10


@tool(has_effects=False)
async def note() -> str:
    """Note."""
    return "noted"


async def main(folder: Path, port: int) -> None:
    done = 0
    async with connect(
        f"http://127.0.0.1:{port}",
        state=folder / "client.db",
        secrets=folder / "secrets.db",
        tools=[note],
        world=HastyWorld(None),
    ) as client:

        async def turns(name: str, count: int) -> int:
            nonlocal done
            numbers = iter(range(count))

            async def ask() -> None:
                nonlocal done
                for _ in numbers:
                    done += 1
                    answer = await client.ask(f"{name}-{done}", "Look at it.")
                    assert answer.endswith("word by word."), answer

            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(ask())
            return done

        print("ready", flush=True)  # noqa: T201 - for the driver
        answer_commands(turns)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
