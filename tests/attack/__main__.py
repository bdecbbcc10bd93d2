"""`make attack`: run all attacks against running servers, one after the other; ARGS=WORDS selects some by name."""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.attack.attack import find_attacks
from tests.attack.ground import Ground


def main(words: str) -> int:
    """Return 0 if no attack succeeds."""
    chosen = find_attacks(words)
    if not chosen:
        sys.exit(f"no attack has {words!r} in its name")
    failed = 0
    for attack in chosen:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            try:
                attack.play(Ground(Path(folder)))
                outcome = "held"
            except Exception:  # noqa: BLE001 - the others are played all the same
                failed += 1
                outcome = f"DID NOT HOLD\n{traceback.format_exc()}"
        print(f"{attack.name:<60} {time.monotonic() - begun:5.1f} s  {outcome}", flush=True)  # noqa: T201 - its report
    print(f"{len(chosen) - failed} of {len(chosen)} held")  # noqa: T201 - its report
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
