"""Places of the operator's keys in commands: a file, or an endpoint of the application."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from typing_extensions import override

if TYPE_CHECKING:
    from midstream.store.encryption.ciphers import OperatorKeys


class KeyEndpoint(Struct, frozen=True):
    """An endpoint that wraps and unwraps keys: see `store.encryption.remote_keys`. The token is not shown."""

    url: str
    token: str = ""

    @override
    def __repr__(self) -> str:
        return f"KeyEndpoint({self.url!r})"


KeyLocation = Path | KeyEndpoint


def open_keys(place: KeyLocation) -> OperatorKeys:
    """Return the keys of a place; no request is sent yet.

    Raises:
        MissingExtraError: The extra is not installed.
        UsageError: The key file cannot be read, or the URL is not safe.
    """
    from midstream.store.encryption.ciphers import FileKeys  # noqa: PLC0415 - an extra that few need
    from midstream.store.encryption.remote_keys import RemoteKeys  # noqa: PLC0415 - see above

    return FileKeys(place) if isinstance(place, Path) else RemoteKeys(place.url, token=place.token)


def make_keys(path: Path) -> None:
    """Create a key file with one new key.

    Raises:
        MissingExtraError: The extra is not installed.
        UsageError: The file exists, or cannot be created. Nothing was changed.
    """
    from midstream.store.encryption.ciphers import FileKeys  # noqa: PLC0415 - an extra that few need

    FileKeys.make(path)
