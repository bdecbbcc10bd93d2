"""The keyring of the user's system, through the package `keyring`.

A backend may wait for a person (a prompt that unlocks it), or for ever. So each call runs on a daemon thread with a
time limit. While a call has not returned, all others are refused at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from midstream.errors import UnavailableError

if TYPE_CHECKING:
    from keyring.backend import KeyringBackend

T = TypeVar("T")

SERVICE = "midstream"
"""Service name of the entries."""
ANSWER_S = 15.0
"""Time limit of a call, in seconds: enough to type a password."""


class OsKeyring:
    """Entries of midstream in the keyring, by name. Each call blocks for at most `answer_s` seconds."""

    def __init__(self, *, answer_s: float = ANSWER_S) -> None:
        self._answer_s = answer_s
        self._last: Future[object] | None = None

    def get(self, name: str) -> str | None:
        """Return an entry, or None.

        Raises:
            UnavailableError: There is no keyring, or it does not answer.
        """
        return self._run(lambda: _backend().get_password(SERVICE, name))

    def put(self, name: str, secret: str) -> None:
        """Store an entry, and check that it was stored.

        Raises:
            UnavailableError: There is no keyring, or it does not answer; the entry may still be stored later.
        """

        def keep() -> None:
            backend = _backend()
            backend.set_password(SERVICE, name, secret)
            if backend.get_password(SERVICE, name) != secret:
                raise UnavailableError("the keyring did not store the secret")

        self._run(keep)

    def delete(self, name: str) -> None:
        """Remove an entry; a missing one is not an error.

        Raises:
            UnavailableError: There is no keyring, or it does not answer; the entry may be removed later.
        """

        def remove() -> None:
            backend = _backend()
            # Backends differ in the removal of a missing entry.
            if backend.get_password(SERVICE, name) is not None:
                backend.delete_password(SERVICE, name)

        self._run(remove)

    def _run(self, work: Callable[[], T]) -> T:
        if self._last is not None and not self._last.done():
            raise UnavailableError("the keyring has not answered an earlier call yet: unlock it")
        future: Future[T] = Future()
        self._last = future  # type: ignore[assignment]  # only whether it is done matters
        threading.Thread(target=_answer, args=(future, work), name="midstream-keyring", daemon=True).start()
        try:
            return future.result(self._answer_s)
        except TimeoutError:
            raise UnavailableError(
                f"the keyring did not answer within {self._answer_s:g} s: unlock it"
            ) from None
        finally:
            del future  # breaks a reference cycle: the error's traceback contains this frame


def _answer(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except UnavailableError as error:
        future.set_exception(error)
    except Exception as error:  # noqa: BLE001 - a backend is foreign code
        # Only the type: the message of a backend may contain anything.
        future.set_exception(UnavailableError(f"the keyring failed ({type(error).__name__})"))
    finally:
        del future  # as in `_run`


def _backend() -> KeyringBackend:
    """Return the backend that `keyring` chose, unless it does not store secrets."""
    try:
        import keyring  # noqa: PLC0415 - an extra, and slow to import
    except ImportError:
        raise UnavailableError(
            "the package `keyring` is not installed: pip install 'midstream[keyring]'"
        ) from None
    backend = keyring.get_keyring()
    # Backends that fail or store nothing, and an empty chain, have a priority of 0 or less.
    if backend.priority <= 0:
        raise UnavailableError("this system has no usable keyring")
    return backend
