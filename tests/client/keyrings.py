"""Backends for `keyring`, as third parties write them: one that stores, in a file, and others that fail."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import keyring
from keyring.backend import KeyringBackend
from keyring.errors import PasswordDeleteError

LONGEST_S = 60.0
"""The longest time for which anything here is held, whatever a test leaves behind."""


class FileKeyring(KeyringBackend):
    """Stores all in one file. `PYTHON_KEYRING_BACKEND` and `KEYRING_PROPERTY_PATH` select it in another process."""

    priority = 1
    path = ""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of the package

    def get_password(self, service: str, username: str) -> str | None:
        return self._all().get(f"{service}/{username}")

    def set_password(self, service: str, username: str, password: str) -> None:
        with self._locked():
            self._write({**self._all(), f"{service}/{username}": password})

    def delete_password(self, service: str, username: str) -> None:
        with self._locked():
            kept = self._all()
            if f"{service}/{username}" not in kept:
                raise PasswordDeleteError("not there")
            del kept[f"{service}/{username}"]
            self._write(kept)

    def lose(self) -> None:
        """Delete everything."""
        Path(self.path).unlink()

    def stored(self) -> list[str]:
        """Return the stored secrets."""
        return sorted(self._all().values())

    def _all(self) -> dict[str, str]:
        path = Path(self.path)
        return dict(json.loads(path.read_text())) if path.exists() else {}

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude changes by other threads and processes: a keyring loses nothing in concurrent writes."""
        with Path(f"{self.path}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
            yield

    def _write(self, kept: dict[str, str]) -> None:
        draft = Path(f"{self.path}.{threading.get_ident()}")
        draft.write_text(json.dumps(kept))
        draft.replace(self.path)


def keyring_in(folder: Path) -> FileKeyring:
    """Return a keyring that stores everything in this folder."""
    backend = FileKeyring()
    backend.path = str(folder / "keyring.json")
    return backend


class LockedKeyring(FileKeyring):
    """Waits for a person before any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.unlocked = threading.Event()

    def _all(self) -> dict[str, str]:
        assert self.unlocked.wait(LONGEST_S), "nobody unlocked it"
        return super()._all()


class BrokenKeyring(FileKeyring):
    """Raises an unexpected error that contains the secret."""

    def set_password(self, service: str, username: str, password: str) -> None:
        raise ZeroDivisionError(f"cannot divide {password}")


class DeadlyKeyring(FileKeyring):
    """Stores the secret, then kills the process."""

    def set_password(self, service: str, username: str, password: str) -> None:
        super().set_password(service, username, password)
        os.kill(os.getpid(), signal.SIGKILL)


class LossyKeyring(FileKeyring):
    """Reports success and stores nothing."""

    def set_password(self, service: str, username: str, password: str) -> None:
        pass


@contextmanager
def use_keyring(backend: KeyringBackend) -> Iterator[None]:
    """Let `keyring` use this backend."""
    before = keyring.get_keyring()
    keyring.set_keyring(backend)
    try:
        yield
    finally:
        keyring.set_keyring(before)
