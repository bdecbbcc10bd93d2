"""Which secret of a session a command shows to its server: one that was brought, else the one that `chat` keeps.

It is brought in a file or in the environment, never in an argument: every user of a machine can read those.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from midstream.cli.env_secrets import read_secret_variable
from midstream.client.secret_store import SecretStore
from midstream.client.session_secrets import SecretsToShow, SessionSecrets
from midstream.environment import World
from midstream.paths import Paths
from midstream.session.child_names import PART_MARK

T = TypeVar("T")
SECRET_VARIABLE = "MIDSTREAM_SECRET"  # noqa: S105 - the name of a variable
"""Its value is shown as the secret of every session that is asked for; also a word for looking at one."""
FILE_VARIABLE = "MIDSTREAM_SECRET_FILE"
"""Names a file that has it; readable by its owner only."""


def read_env_secret() -> str:
    """Return the secret that the environment brings, "" where it brings none.

    Raises:
        UsageError: The file cannot be read, or others may read it.
    """
    return read_secret_variable(SECRET_VARIABLE, FILE_VARIABLE, "the secret")


def read_secrets(url: str, session: str, places: Paths | None) -> SecretsToShow:
    """Return what is shown to a server for one of its sessions.

    Raises:
        MidstreamError: As `read_env_secret`; or the secrets that are kept cannot be read.
    """
    if secret := read_env_secret():
        return SecretsToShow(secret)
    path = (places or Paths.find()).secrets
    return (
        asyncio.run(_with(path, url, lambda kept: kept.read(session))) if path.exists() else SecretsToShow()
    )


def delete_secret(url: str, session: str, places: Paths | None) -> None:
    """Keep what was kept for a session no longer: it was deleted.

    Raises:
        MidstreamError: It may still be kept.
    """
    path = (places or Paths.find()).secrets
    if path.exists() and PART_MARK not in session:
        asyncio.run(_with(path, url, lambda kept: kept.delete(session)))


async def _with(path: Path, url: str, do: Callable[[SessionSecrets], Awaitable[T]]) -> T:
    store = SecretStore(path, world=World())
    try:
        return await do(SessionSecrets(store, server=url.rstrip("/"), world=World()))
    finally:
        await store.close()
