"""The secret of each session of a client: shown by all of its streams, kept where the secrets of streams are.

It is made with the first stream. It stays, unless the server shows that the session is not encrypted under it: then
the stream's own copy is enough. While it is being changed there are two: the next one is written down first, and both
are shown, until the server is known to open the session by the next one. So a process that dies in between has the
right one all the same. Nothing is remembered here: what is kept is read each time, so that what one process of a user
changes is shown by all of them (STREAM-96).
"""

from __future__ import annotations

from msgspec import Struct

from midstream.client.secret_store import SecretKey, SecretStore
from midstream.environment import World
from midstream.session.child_names import root_of

NEXT = "next"
"""In the place of a stream's key: no stream is called so."""


class SecretsToShow(Struct, frozen=True):
    """The secrets that are shown to a server, each "" where there is none."""

    secret: str = ""
    old_secret: str = ""

    def __repr__(self) -> str:
        return "Shown(...)"

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a request that shows them."""
        named = {
            "x-idempotent-encryption-key": self.secret,
            "x-idempotent-encryption-key-old": self.old_secret,
        }
        return {name: value for name, value in named.items() if value}


class SessionSecrets:
    """The secrets of the sessions of one server, as all processes of this user keep them: read anew each time."""

    def __init__(self, store: SecretStore, *, server: str, world: World) -> None:
        self._store = store
        self._server = server
        self._world = world
        self._unneeded: set[str] = set()
        """Sessions that, by the server's answer, are not encrypted under a client's secret."""

    async def read(self, session: str) -> SecretsToShow:
        """Return what a session is opened with, as far as that is known here.

        Raises:
            MidstreamError: As `SecretStore.get`.
        """
        root = root_of(session)
        # In this order: the end of a change first writes the next secret over the old one, then deletes its entry.
        following = await self._store.get(self._key(root, NEXT))
        secret = await self._store.get(self._key(root)) or ""
        if following is None:
            return SecretsToShow(secret)
        return SecretsToShow(following, "" if secret == following else secret)

    async def read_or_create(self, session: str) -> SecretsToShow:
        """Return what a session is opened with; for a new one a secret is made, and kept where it may be needed.

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
        """Keep this secret of a session that its server encrypts under it, unless one is kept.

        A session that needed none may be gone, and begun anew at another kind of server.

        Raises:
            MidstreamError: As `SecretStore.put`. Called again, it stores the secret then.
        """
        root = root_of(session)
        await self._store.put(self._key(root), secret)
        self._unneeded.discard(root)

    async def release(self, session: str) -> None:
        """Keep no secret of a session that its server does not encrypt under one.

        Raises:
            MidstreamError: It could not be deleted, and may still be kept.
        """
        root = root_of(session)
        if root not in self._unneeded:
            await self.delete(root)
            self._unneeded.add(root)

    async def delete(self, session: str) -> None:
        """Keep and show no secret of a session any more; a stream of it that lives may bring it back.

        Raises:
            MidstreamError: It could not be deleted, and may still be kept.
        """
        for name in ("", NEXT):
            await self._store.delete(self._key(root_of(session), name))

    async def keep(self, session: str, secret: str) -> SecretsToShow:
        """Store the secret of a session from another client of this person; return the secret that counts now.

        Raises:
            MidstreamError: As `SecretStore.put`.
        """
        root = root_of(session)
        before = await self._store.get(self._key(root))
        counts = await self._store.put(self._key(root), secret, replaces=before)
        await self._store.delete(self._key(root, NEXT))
        return SecretsToShow(counts)

    async def begin_change(self, session: str) -> SecretsToShow:
        """Draw the next secret of a session, unless one was drawn, and return both.

        Raises:
            MidstreamError: As `SecretStore.put`. Nothing was changed.
        """
        await self.read_or_create(session)
        await self._store.put(self._key(root_of(session), NEXT), self._world.new_secret())
        return await self.read(session)

    async def end_change(self, session: str, both: SecretsToShow) -> None:
        """The server opens the session by the next secret of these: the one before is forgotten.

        Where another process ended the change, or both were released meanwhile, there is nothing to end.

        Raises:
            MidstreamError: As `SecretStore.put`. Both are still kept, and shown.
        """
        root = root_of(session)
        if await self.read(root) == both:
            await self._store.put(self._key(root), both.secret, replaces=both.old_secret)
            await self._store.delete(self._key(root, NEXT), only=both.secret)

    def _key(self, root: str, stream: str = "") -> SecretKey:
        return SecretKey(self._server, root, stream)
