"""Where the clients of this user keep their secrets, for `midstream doctor`."""

from __future__ import annotations

from pathlib import Path

from midstream.client.os_keyring import OsKeyring
from midstream.client.secret_store import Survey, survey
from midstream.doctor.installation import Check, Verdict
from midstream.errors import MidstreamError
from midstream.world import World

INSTALL = "pip install 'midstream[keyring]'"


def check_secrets(path: Path, *, keyring: OsKeyring, world: World = World()) -> Check:
    """Look at a file of secrets, and whether a keyring answers. No secret is read, and nothing is written."""
    try:
        found = survey(path, now=world.now())
    except MidstreamError as error:
        return Check("secrets", Verdict.PROBLEM, error.message)
    backend = keyring.name()
    verdict = Verdict.WARNING if found.in_file or found.orphans else Verdict.OK
    return Check("secrets", verdict, "; ".join(_words(found, path, backend)))


def _words(found: Survey, path: Path, backend: str) -> list[str]:
    words = []
    if found.in_file:
        words.append(f"{found.in_file} stand in {str(path)!r}, which only this user may read")
    if found.in_keyring:
        words.append(f"the keyring has {found.in_keyring}")
    if found.orphans:
        words.append(
            f"{found.orphans} belong to nothing any more: clients clear them, at the latest after a week"
        )
    words.append(
        f"new ones go to the keyring ({backend})"
        if backend
        else f"new ones go to a file: no keyring answers here ({INSTALL})"
    )
    return words
