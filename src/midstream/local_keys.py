"""The key of this user's own servers on this machine, and its proofs.

`midstream serve` creates the key once, readable only by its user. The key is never sent. A client of a server on this
machine first sends a nonce, and the server answers with a proof under the key. Only then the client sends its token.
Both are HMACs over the address of the connection and the random name of the server's start. So a program that listens
instead of the server receives no usable value, and cannot forward the proof of a server at another address. The token
is valid until the server ends.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import ipaddress
import json
import os
import ssl
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from midstream.environment import World
from midstream.errors import ConnectionLostError, UnauthorizedError, UsageError
from midstream.file_safety import create_own_once, read_secret_text
from midstream.paths import Paths, make_folder

KEY_FILE = "server-key"
TOKEN_VARIABLE = "MIDSTREAM_TOKEN"  # noqa: S105 - the name of a variable
"""Its value is `ORIGIN TOKEN`; the token is sent only there. The default origin is `MIDSTREAM_URL`."""
URL_VARIABLE = "MIDSTREAM_URL"
"""The environment variable with the default address of the server for commands."""
CHALLENGE_PATH = "/v1/challenge"
CHALLENGE_S = 5.0
"""Seconds for a server of this machine to send its proof."""
_PROOF_BYTES_MAX = 4096


def read_or_make_key(folder: Path) -> str:
    """Return the key in a folder; create it if there is none.

    Raises:
        UsageError: Another user owns it, or may read it; or it is not a regular file.
    """
    path = make_folder(folder) / KEY_FILE
    if not path.exists() and not path.is_symlink():
        create_own_once(path, f"{World().new_secret()}\n".encode())
    return read_secret_text(path, "the key").strip()


def token_for(key: str, address: str, start: str) -> str:
    """Return the token of a client for one start of the server at an address."""
    return f"{start}.{_mac(key, 'client', address, start)}"


def start_of(token: str) -> str:
    """Return the server's start in a token; "" if the token has another form."""
    return token.partition(".")[0]


def prove_server(key: str, address: str, start: str, nonce: str) -> str:
    """Return the proof of a server for the nonce of a client."""
    return _mac(key, "server", address, start, nonce)


def address_of_socket(name: Sequence[object]) -> str:
    """Return the name of a socket for proofs: the address and the port."""
    return f"{name[0]} {name[1]}"


def headers_for(url: str, places: Paths | None = None) -> dict[str, str]:
    """Return the headers that authenticate this user at a server; none if there is no credential for it.

    A server of this machine must first send its proof. Call this for each connection: the server may have been
    restarted, and another program may have its port.

    Args:
        url: The server's address.
        places: The folders with the key; by default the user's own.

    Raises:
        UsageError: `url` has an invalid port, `MIDSTREAM_TOKEN` has no origin, or the key file is not private.
        UnauthorizedError: The program at `url` has no proof under the key of this user. Only a nonce was sent.
        ConnectionLostError: No program answers at `url`, a server of this machine.
    """
    try:
        parts = urlsplit(url)
        origin = _origin_of(parts)
    except ValueError as error:
        raise UsageError(f"{url!r} is not a valid address: {error}") from error
    if given := _given_token():
        for_origin, token = given
        if for_origin == origin:
            return {"authorization": f"Bearer {token}"}
    if not is_loopback(parts.hostname or ""):
        return {}
    try:
        key = read_secret_text((places or Paths.find()).data / KEY_FILE, "the key").strip()
    except (OSError, RuntimeError):  # RuntimeError of pathlib: this user has no home
        return {}
    return _authenticate(parts, key) if key else {}


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own, which a proxy cannot reach."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _authenticate(parts: SplitResult, key: str) -> dict[str, str]:
    """Verify the server's proof, and return the headers for it; none if it does not support proofs."""
    nonce = World().new_secret()
    is_encrypted = parts.scheme in {"https", "wss"}
    kind = http.client.HTTPSConnection if is_encrypted else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=CHALLENGE_S)
    try:
        connection.connect()
        address = address_of_socket(connection.sock.getpeername())
        headers = {"content-type": "application/json", "connection": "close"}
        body = json.dumps({"nonce": nonce})
        connection.request("POST", parts.path.rstrip("/") + CHALLENGE_PATH, body, headers)
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            return {}  # it has another authentication, or none
        told = json.loads(answer.read(_PROOF_BYTES_MAX))
        start, proof = str(told["start"]), str(told["proof"])
    except ssl.SSLError:
        return {}  # the following request finds the reason
    except (OSError, http.client.HTTPException) as error:
        # Of several workers at one port one may have ended. The next one would refuse a request without a credential.
        where = f"{parts.scheme}://{parts.netloc}"
        raise ConnectionLostError(f"no answer from {where} ({type(error).__name__})") from error
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}  # another program
    finally:
        connection.close()
    expected = prove_server(key, address, start, nonce)
    if not hmac.compare_digest(expected.encode(), proof.encode("utf-8", "replace")):
        raise UnauthorizedError(
            f"the program at {parts.scheme}://{parts.netloc} is no server of this user: it does not have the key; "
            "nothing was sent to it"
        )
    return {"authorization": f"Bearer {token_for(key, address, start)}"}


def _given_token() -> tuple[str, str] | None:
    """Return the origin and the token of `MIDSTREAM_TOKEN`, or None.

    Raises:
        UsageError: It has no origin.
    """
    words = os.environ.get(TOKEN_VARIABLE, "").split()
    if not words:
        return None
    try:
        if len(words) == 1 and (url := os.environ.get(URL_VARIABLE, "")):
            return _origin_of(urlsplit(url)), words[0]
        if len(words) == 2 and "://" in words[0]:  # noqa: PLR2004 - an origin and a token
            return _origin_of(urlsplit(words[0])), words[1]
    except ValueError as error:
        raise UsageError(f"{TOKEN_VARIABLE} or {URL_VARIABLE} has no valid address: {error}") from error
    raise UsageError(
        f"{TOKEN_VARIABLE} names no server, so it is sent to none; write "
        f"{TOKEN_VARIABLE}='https://agents.example TOKEN', "
        f"or set {URL_VARIABLE} to the address of its server"
    )


def _origin_of(parts: SplitResult) -> str:
    """Return the origin of an address: scheme, host and port."""
    is_encrypted = parts.scheme in {"https", "wss"}
    port = parts.port or (443 if is_encrypted else 80)
    return f"{'https' if is_encrypted else 'http'}://{(parts.hostname or '').lower()}:{port}"


def _mac(key: str, role: str, *parts: str) -> str:
    message = "\0".join(("midstream local user", role, *parts)).encode("utf-8", "surrogatepass")
    return hmac.digest(key.encode(), message, hashlib.sha256).hex()
