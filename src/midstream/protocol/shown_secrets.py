"""The secrets that a stream shows, and what it makes of their refusal: another process may have changed them.

What opens a session is read by the shell, anew for each connection but the first, and once more where the server
refused it. So a change of one process reaches the streams of all others, and a refused secret is not shown again and
again (STREAM-96).
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from midstream.errors import MidstreamError, WrongSecretError


class ShownSecrets(Struct, frozen=True):
    """The secrets of one stream, over all its connections.

    Args:
        secret: What opens the session, or the stream, as it was just read; "" where nothing does.
        old_secret: What it was before it was changed; "" where it was not.
        own: What the stream began with: where its session has another one by now, both are shown.
        is_due: They have to be read anew before the next connection.
        refusal: The server's refusal of them, until newly read ones are there.
        was_refused: They were since the server took some.
    """

    secret: str
    old_secret: str
    own: str
    is_due: bool = False
    refusal: MidstreamError | None = None
    was_refused: bool = False

    def __repr__(self) -> str:
        return "ShownSecrets(...)"

    def with_secrets(self, secret: str, old_secret: str) -> ShownSecrets:
        """Return them as newly read, "" where they could not be: the refusal stays where it was of just these."""
        own = "" if secret == self.own else self.own
        newest = (secret, old_secret or own) if secret else (self.secret, self.old_secret)
        refusal = self.refusal if newest == (self.secret, self.old_secret) else None
        return replace(self, secret=newest[0], old_secret=newest[1], is_due=False, refusal=refusal)

    def with_doubt(self, error: MidstreamError | None) -> ShownSecrets | None:
        """Return them as ones to be read once more because of this error; None where it is final."""
        if self.was_refused or not isinstance(error, WrongSecretError):
            return None
        return replace(self, refusal=error, was_refused=True)

    def with_acceptance(self) -> ShownSecrets:
        """Return them as the server took them: the next refusal is a first one."""
        return replace(self, was_refused=False) if self.was_refused else self
