"""The key of this user's own servers on this machine, and the tokens made of it: who can read it may use them.

`midstream serve` makes it once, readable by its user alone. It never leaves its file: what is shown to a server is a
token made of the key and the server's port, so that another program which listens on some port learns nothing that
opens a server on any other.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from pathlib import Path
from urllib.parse import urlsplit

from midstream.environment import World
from midstream.errors import UsageError
from midstream.paths import Paths, make_folder

KEY_FILE = "server-key"
TOKEN_VARIABLE = "MIDSTREAM_TOKEN"  # noqa: S105 - the name of a variable
"""Its value is shown, as a bearer token, to every server that is talked to."""


def read_or_make_key(folder: Path) -> str:
    """Return the key that lies in a folder; it is made where there is none.

    Raises:
        UsageError: Others than its owner may read it.
    """
    path = make_folder(folder) / KEY_FILE
    if not path.exists():
        # Made beside it and linked: half a key is never read, and of two processes that make one the first wins.
        fresh = path.with_name(f".{World().new_id(KEY_FILE)}")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(World().new_secret() + "\n")
        try:
            path.hardlink_to(fresh)
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise UsageError(
            f"{path} is readable by other users; restrict it with chmod 600, or remove it to create a new one"
        )
    return path.read_text(encoding="ascii").strip()


def token_for(key: str, port: int) -> str:
    """Return what the server on a port of this machine expects from its user."""
    return hmac.digest(key.encode(), b"midstream server on port %d" % port, hashlib.sha256).hex()


def headers_for(url: str, places: Paths | None = None) -> dict[str, str]:
    """Return the headers that authenticate us at a server; none where we have no key for it.

    Args:
        url: The server's address.
        places: Where the key lies; the user's own places by default.

    Raises:
        UsageError: `url` has no port that there is.
    """
    if token := os.environ.get(TOKEN_VARIABLE, ""):
        return {"authorization": f"Bearer {token}"}
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme in {"https", "wss"} else 80)
    except ValueError as error:
        raise UsageError(f"{url!r} is not a valid address: {error}") from error
    if not is_loopback(parts.hostname or ""):
        return {}
    try:
        key = ((places or Paths.find()).data / KEY_FILE).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError, RuntimeError):  # the last one of pathlib: this user has no home
        return {}
    return {"authorization": f"Bearer {token_for(key, port)}"} if key else {}


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own, which no proxy can reach."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
