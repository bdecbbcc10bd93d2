"""The secret of each session of a client, which all of its streams send, in the file of secrets.

It is created with the first stream. If the server does not encrypt the session under it, it is removed, because the
stream has a copy. During a change there are two secrets. The next one is stored first, and both are sent until the
server confirms the next one. So a crash in between loses no secret. Secrets are read from the file each time, so that
all processes of a user send the current ones (STREAM-96).
"""

from __future__ import annotations

from msgspec import Struct

from midstream.client.secret_store import SecretKey, SecretStore
from midstream.environment import World
from midstream.session.child_names import root_of

NEXT = "next"
"""Replaces the stream key for the next secret; no stream has this key."""


class SecretsToShow(Struct, frozen=True):
    """The secrets for a server, each "" if missing."""

    secret: str = ""
    old_secret: str = ""

    def __repr__(self) -> str:
        return "Shown(...)"

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a request with these secrets."""
        named = {
            "x-idempotent-encryption-key": self.secret,
            "x-idempotent-encryption-key-old": self.old_secret,
        }
        return {name: value for name, value in named.items() if value}


class SessionSecrets:
    """The secrets of one server's sessions, shared by all processes of this user."""

    def __init__(self, store: SecretStore, *, server: str, world: World) -> None:
        self._store = store
        self._server = server
        self._world = world
        self._unneeded: set[str] = set()
        """Sessions that the server does not encrypt under a client's secret."""

    async def read(self, session: str) -> SecretsToShow:
        """Return the known secrets of a session.

        Raises:
            MidstreamError: As `SecretStore.get`.
        """
        root = root_of(session)
        # In this order: `end_change` first replaces the old secret by the next one, then deletes the entry of the next
        # one.
        following = await self._store.get(self._key(root, NEXT))
        secret = await self._store.get(self._key(root)) or ""
        if following is None:
            return SecretsToShow(secret)
        return SecretsToShow(following, "" if secret == following else secret)

    async def read_or_create(self, session: str) -> SecretsToShow:
        """Return the secrets of a session; create a missing one, and store it if it may be needed.

        Raises:
            MidstreamError: As `SecretStore.put`.
        """
        found = await self.read(session)
        if found.secret:
            return found
        secret, root = self._world.new_secret(), root_of(session)
        return SecretsToShow(
            secret if root in self._unneeded else await self._store.put(self._key(root), secret)
        )

    async def need(self, session: str, secret: str) -> None:
        """Store this secret of an encrypted session, unless another one is stored.

        A session that needed no secret may have been deleted and begun again at another kind of server.

        Raises:
            MidstreamError: As `SecretStore.put`. Called again, it stores the secret then.
        """
        root = root_of(session)
        await self._store.put(self._key(root), secret)
        self._unneeded.discard(root)

    async def release(self, session: str) -> None:
        """Remove the secret of a session that its server does not encrypt.

        Raises:
            MidstreamError: The secret could not be removed, and may still be stored.
        """
        root = root_of(session)
        if root not in self._unneeded:
            await self.delete(root)
            self._unneeded.add(root)

    async def delete(self, session: str) -> None:
        """Delete all secrets of a session. An open stream of it may store the secret again.

        Raises:
            MidstreamError: The secret could not be deleted, and may still be stored.
        """
        for name in ("", NEXT):
            await self._store.delete(self._key(root_of(session), name))

    async def keep(self, session: str, secret: str) -> SecretsToShow:
        """Store the secret of a session from another client of this person; return the current secrets.

        Raises:
            MidstreamError: As `SecretStore.put`.
        """
        root = root_of(session)
        before = await self._store.get(self._key(root))
        counts = await self._store.put(self._key(root), secret, replaces=before)
        await self._store.delete(self._key(root, NEXT))
        return SecretsToShow(counts)

    async def begin_change(self, session: str) -> SecretsToShow:
        """Create the next secret of a session, unless one exists; return both secrets.

        Raises:
            MidstreamError: As `SecretStore.put`. Nothing was changed.
        """
        await self.read_or_create(session)
        await self._store.put(self._key(root_of(session), NEXT), self._world.new_secret())
        return await self.read(session)

    async def end_change(self, session: str, both: SecretsToShow) -> None:
        """Delete the old secret, after the server has confirmed the next one.

        If another process ended the change, or removed the secrets, do nothing.

        Raises:
            MidstreamError: As `SecretStore.put`. Both secrets are still stored and sent.
        """
        root = root_of(session)
        if await self.read(root) == both:
            await self._store.put(self._key(root), both.secret, replaces=both.old_secret)
            await self._store.delete(self._key(root, NEXT), only=both.secret)

    def _key(self, root: str, stream: str = "") -> SecretKey:
        return SecretKey(self._server, root, stream)
