"""Attachments with an address instead of content, and the ones that an agent on this machine may read.

An agent reads an address with the rights of this process and from inside its network. A sender must not be able to
choose `file:///etc/passwd`, a service on loopback or the metadata service of a cloud. So an agent gets only public
addresses of the web, and files below its working folder.

The agent resolves a host's name again when it fetches the address. If the addresses change in between, it may still
reach a private one: only a firewall around the agent prevents that.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from msgspec.structs import replace

from midstream.errors import AccessError
from midstream.history.messages import File, Text, UserMessage

RESOLVE_S = 5.0
"""Seconds for resolving a host's name."""
_WEB = frozenset(("http", "https"))
_PLAIN = re.compile(r"[!-\[\]-~]+")
"""Printable ASCII without a backslash: parsers of addresses differ about everything else."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

_log = logging.getLogger(__name__)

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""Return the IP addresses of a host; raises OSError if there are none."""


def refuse_local_files(message: UserMessage) -> None:
    """Refuse files of this machine in a message of another user.

    Raises:
        AccessError: An attachment is a `file:` address.
    """
    if any(isinstance(part, File) and _scheme_of(part.url or "") == "file" for part in message.parts):
        raise AccessError(
            "an attachment names a file of the server's machine, which only its operator there may do; "
            "send the content of the file"
        )


async def resolve(host: str) -> Sequence[str]:
    """Return the addresses of a host from the system.

    Raises:
        OSError: There are none, or none within `RESOLVE_S`.
    """
    try:  # an IP address in any of its spellings needs no name server
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        asking = asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        async with asyncio.timeout(RESOLVE_S):  # a TimeoutError is an OSError
            found = await asking
    return [str(each[4][0]) for each in found]


async def with_readable_files(message: UserMessage, folder: Path, resolve: Resolve = resolve) -> UserMessage:
    """Return a message for an agent in this folder: files that it must not read are replaced by their names."""
    if not any(isinstance(part, File) and part.url for part in message.parts):
        return message
    parts = [
        await _readable(part, folder, resolve) if isinstance(part, File) and part.url else part
        for part in message.parts
    ]
    return UserMessage(tuple(parts))


async def _readable(file: File, folder: Path, resolve: Resolve) -> File | Text:
    url = file.url or ""
    scheme = _scheme_of(url)
    why = "its address is not a public one of the web"
    if scheme == "data":
        return file
    if scheme == "file":
        path = _path_below(url, folder)
        if path is not None:
            return replace(file, url=path.as_uri() + _fragment_of(url))
        why = "it is not below the agent's working folder"
    elif scheme in _WEB and await _is_public(url, resolve):
        return file
    _log.warning("an attachment was not given to the agent: %s", why)
    return Text(
        f"[An attachment was left out, because {why}: {file.name or 'without a name'}, {file.media_type}]"
    )


def _scheme_of(url: str) -> str:
    return url.lstrip().partition(":")[0].lower()


def _fragment_of(url: str) -> str:
    _, mark, fragment = url.partition("#")
    return mark + fragment


def _path_below(url: str, folder: Path) -> Path | None:
    """Return the file of a `file:` address, with resolved links; None if it is not below the folder."""
    try:
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost") or parts.query or not _PLAIN.fullmatch(url):
            return None
        path = Path(url2pathname(parts.path)).resolve()
        return path if path.is_relative_to(folder.resolve()) else None
    except (ValueError, OSError, RuntimeError):  # not an address, not a path, or a cycle of links
        return None


async def _is_public(url: str, resolve: Resolve) -> bool:
    """Whether all addresses of a URL's host are public."""
    if not _PLAIN.fullmatch(url):
        return False
    try:
        host = urlsplit(url).hostname
        found = await resolve(host) if host else ()
    except (ValueError, OSError, UnicodeError):
        return False
    return bool(found) and all(map(is_public_address, found))


def is_public_address(address: str) -> bool:
    """Whether an IP address is public, also an IPv6 address that contains an IPv4 address."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is None and ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public_address(str(inner))
    return ip.is_global and not ip.is_multicast
