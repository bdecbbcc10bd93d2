"""Changes by another process of the same user reach the running streams of this one."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
from keyring.core import load_keyring

from midstream.client import Event, connect
from midstream.client.client import Client
from midstream.client.transport_selection import TransportName
from midstream.errors import WrongSecretError
from midstream.session.records import Delta, TurnEnded
from tests.client.keyrings import FileKeyring, use_keyring
from tests.client.proxies import OfficeProxy
from tests.house.source import ROOT
from tests.server.escrowing import escrowed_app
from tests.server.serving import served
from tests.server.test_page import WHOLE, two_halves
from tests.spec import spec

WAIT_S = 60.0
NO_KEYRING = "keyring.backends.fail.Keyring"
CHANGE = """
import asyncio, sys
from midstream.client import connect

async def main(url, state, secrets):
    async with connect(url, state=state, secrets=secrets) as client:
        await client.change_secret("s1")

asyncio.run(main(*sys.argv[1:]))
"""


async def _change_elsewhere(folder: Path, url: str, **more: str) -> None:
    """Let another process change the secret of the session."""
    arguments = [url, str(folder / "other" / "state.db"), str(folder / "secrets.db")]
    changing = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHANGE, *arguments, cwd=ROOT, env={**os.environ, **more}
    )
    assert await asyncio.wait_for(changing.wait(), WAIT_S) == 0


async def _change_by_another_client(folder: Path, url: str) -> None:
    """Change the secret as another process does, faster than a connection is made."""
    secrets = folder / "secrets.db"
    async with connect(url, state=folder / "other" / "state.db", secrets=secrets, keyring=False) as client:
        await client.change_secret("s1")


def _client(folder: Path, url: str, way: TransportName, *, keyring: bool = False) -> Client:
    secrets = folder / "secrets.db"
    return connect(url, transport=way, state=folder / "state.db", secrets=secrets, keyring=keyring)


async def _first_half(events: AsyncIterator[Event]) -> str:
    async for event in events:
        if isinstance(event.record, Delta):
            return event.record.text
    raise AssertionError("no text arrived")


async def _rest(events: AsyncIterator[Event]) -> str:
    records = [event.record async for event in events]
    assert isinstance(records[-1], TurnEnded)
    return "".join(each.text for each in records if isinstance(each, Delta))


@spec("STREAM-96")
@pytest.mark.parametrize(("way", "is_in_keyring"), [("websocket", False), ("sse", True), ("poll", False)])
async def test_a_secret_changed_by_another_process_is_sent_by_the_next_connection_of_a_stream(
    tmp_path: Path, way: TransportName, *, is_in_keyring: bool
) -> None:
    ring, gate = FileKeyring(), asyncio.Event()
    ring.path = str(tmp_path / "keyring.json")
    more = {
        "PYTHON_KEYRING_BACKEND": f"{FileKeyring.__module__}.FileKeyring",
        "KEYRING_PROPERTY_PATH": ring.path,
    }
    async with (
        served(escrowed_app(tmp_path, two_halves(gate))) as server,
        OfficeProxy(server.url).listening() as proxy,
    ):
        with use_keyring(ring if is_in_keyring else load_keyring(NO_KEYRING)):
            async with (
                asyncio.timeout(WAIT_S),
                _client(tmp_path, proxy.url, way, keyring=is_in_keyring) as client,
                aclosing(client.send("s1", "go on")) as events,
            ):
                text = await _first_half(events)
                before = await client.secret("s1")
                for _ in range(2):  # the stream's first secret is no longer valid
                    await _change_elsewhere(tmp_path, proxy.url, **(more if is_in_keyring else {}))
                asked = len(proxy.asked)
                proxy.cut()
                gate.set()
                assert text + await _rest(events) == WHOLE
                assert await client.secret("s1") not in ("", before)
                assert proxy.asked[asked:].count("upgrade") <= 1, "what was refused was shown again"


@spec("STREAM-96")
@pytest.mark.parametrize("is_reported", [True, False])
async def test_a_secret_changed_while_a_connection_is_made_is_read_again(
    tmp_path: Path, *, is_reported: bool
) -> None:
    gate = asyncio.Event()
    async with (
        served(escrowed_app(tmp_path, two_halves(gate))) as server,
        OfficeProxy(server.url).listening() as proxy,
    ):
        with use_keyring(load_keyring(NO_KEYRING)):
            async with (
                asyncio.timeout(WAIT_S),
                _client(tmp_path, proxy.url, "websocket") as client,
                aclosing(client.send("s1", "go on")) as events,
            ):
                text = await _first_half(events)
                before = await client.secret("s1")

                async def change() -> None:
                    for _ in range(2):
                        await _change_by_another_client(tmp_path, proxy.url)
                    if not is_reported:
                        await client.keep_secret("s1", before)

                asked = len(proxy.asked)
                proxy.before_upgrade = change
                proxy.cut()
                gate.set()
                if is_reported:
                    assert text + await _rest(events) == WHOLE
                else:
                    with pytest.raises(WrongSecretError):
                        await _rest(events)
                assert proxy.asked[asked:].count("upgrade") == 1 + is_reported
