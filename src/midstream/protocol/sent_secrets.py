"""The secrets that a stream sends, and its reaction to a refusal: another process may have changed them.

The shell reads the session's secrets again for each connection except the first, and after a refusal. So a change by
one process reaches the streams of all others, and a refused secret is not sent repeatedly (STREAM-96).
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from midstream.errors import MidstreamError, WrongSecretError


class SentSecrets(Struct, frozen=True):
    """The secrets of one stream, over all its connections.

    Args:
        secret: The last read secret of the session, or of the stream; "" if there is none.
        old_secret: The previous secret; "" if it was not changed.
        own: The secret with which the stream began; if the session has another one now, both are sent.
        is_due: Whether they must be read again before the next connection.
        refusal: The server's refusal of them, until they were read again.
        was_refused: Whether they were refused since the server last accepted some.
    """

    secret: str
    old_secret: str
    own: str
    is_due: bool = False
    refusal: MidstreamError | None = None
    was_refused: bool = False

    def __repr__(self) -> str:
        return "SentSecrets(...)"

    def with_secrets(self, secret: str, old_secret: str) -> SentSecrets:
        """Return the newly read secrets, "" if there are none; a refusal of exactly these stays."""
        own = "" if secret == self.own else self.own
        newest = (secret, old_secret or own) if secret else (self.secret, self.old_secret)
        refusal = self.refusal if newest == (self.secret, self.old_secret) else None
        return replace(self, secret=newest[0], old_secret=newest[1], is_due=False, refusal=refusal)

    def with_doubt(self, error: MidstreamError | None) -> SentSecrets | None:
        """Return these with a request to read them again after this error; None if the error is final."""
        if self.was_refused or not isinstance(error, WrongSecretError):
            return None
        return replace(self, refusal=error, was_refused=True)

    def with_acceptance(self) -> SentSecrets:
        """Return these as accepted: the next refusal is a first one."""
        return replace(self, was_refused=False) if self.was_refused else self
