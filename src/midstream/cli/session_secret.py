"""The secret of a session for its server: from the environment or a file, else the one that `chat` stored.

It is never in an argument, because every user of a machine can read those.
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
"""Variable with the secret for all sessions of a command, or with a viewer token."""
FILE_VARIABLE = "MIDSTREAM_SECRET_FILE"
"""Variable with the path of a file with the secret, readable by its owner only."""


def read_env_secret() -> str:
    """Return the secret from the environment, or "".

    Raises:
        UsageError: The file cannot be read, or other users may read it.
    """
    return read_secret_variable(SECRET_VARIABLE, FILE_VARIABLE, "the secret")


def read_secrets(url: str, session: str, places: Paths | None) -> SecretsToShow:
    """Return the secrets of a session for its server.

    Raises:
        MidstreamError: As `read_env_secret`, or the stored secrets cannot be read.
    """
    if secret := read_env_secret():
        return SecretsToShow(secret)
    path = (places or Paths.find()).secrets
    return (
        asyncio.run(_with(path, url, lambda kept: kept.read(session))) if path.exists() else SecretsToShow()
    )


def delete_secret(url: str, session: str, places: Paths | None) -> None:
    """Delete the stored secrets of a deleted session.

    Raises:
        MidstreamError: They may not have been deleted.
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
