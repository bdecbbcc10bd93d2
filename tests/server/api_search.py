"""Let schemathesis look at our server for long: python -m tests.server.api_search [TIMES]."""

from __future__ import annotations

import asyncio
import sys

from midstream.testing.models import text
from tests.server.serving import KEYS, chunk, make_app, served
from tests.server.test_openapi import CONFIGURATION, SCHEMATHESIS

EXAMPLES = 4


async def main(times: int) -> int:
    async with served(make_app([text("ready")] * 100_000)) as server:
        await server.http.post("/v1/sessions/s1/chunks", json=chunk(), headers=KEYS)
        looking = await asyncio.create_subprocess_exec(
            SCHEMATHESIS,
            f"--config-file={CONFIGURATION}",
            "run",
            f"{server.url}/v1/openapi.json",
            f"--max-examples={EXAMPLES * times}",
            "--exclude-operation-id=events",
            "--request-timeout=5",
        )
        return await looking.wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)))
