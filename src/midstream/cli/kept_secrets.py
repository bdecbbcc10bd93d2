"""Check of the stored secrets of this user's clients, for `midstream doctor`."""

from __future__ import annotations

from pathlib import Path

from midstream.client.secret_store import survey
from midstream.doctor.installation import Check, CheckResult
from midstream.errors import MidstreamError


def check_secrets(path: Path) -> Check:
    """Return the numbers of secrets in a file, without reading a secret or the keyring."""
    try:
        found = survey(path)
    except MidstreamError as error:
        return Check("secrets", CheckResult.PROBLEM, error.message)
    words = [f"{found.in_file} are stored in {str(path)!r}, which only this user can read"]
    if found.in_keyring:
        words.append(f"the keyring has {found.in_keyring}")
    if found.orphans:
        words.append(f"{found.orphans} are no longer used; clients remove them within a week")
    verdict = CheckResult.WARNING if found.orphans else CheckResult.OK
    return Check("secrets", verdict, "; ".join(words))
