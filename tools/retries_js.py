"""Write the retry constants of the JavaScript client from `midstream.retries`.

python tools/retries_js.py
"""

from __future__ import annotations

from pathlib import Path

from midstream import retries
from midstream.protocol.stream_settings import HEARTBEAT_S_MAX

TARGET = Path(__file__).parents[1] / "src/midstream/server/static/client/retries.js"
CONSTANTS = (
    (
        "RECONNECT_FIRST_MS",
        retries.RECONNECT_BACKOFF.first_s,
        "Longest pause before the second reconnect; the first one is made at once, and chance decides the rest.",
    ),
    (
        "RECONNECT_MOST_MS",
        retries.RECONNECT_BACKOFF.most_s,
        "Longest pause before any reconnect: it doubles up to this.",
    ),
    ("RETRY_AFTER_MAX_MS", retries.RETRY_AFTER_MAX_S, "Longest pause that a server can ask for."),
    ("STOPPED_PATIENCE_MS", retries.STOPPED_PATIENCE_S, "How long the end of a stopped turn is tried for."),
    ("HEARTBEAT_MAX_MS", HEARTBEAT_S_MAX, "Longest interval between heartbeats that is accepted."),
)


def text() -> str:
    """Return the whole JavaScript module."""
    lines = ["/** Retry constants, generated from `src/midstream/retries.py` by `tools/retries_js.py`. */"]
    for name, seconds, meaning in CONSTANTS:
        lines += ["", f"/** {meaning} */", f"export const {name} = {round(seconds * 1000)};"]
    missed = retries.HEARTBEATS_MISSED_MAX
    lines += ["", "/** Missing heartbeats before a connection counts as dead. */"]
    lines += [f"export const HEARTBEATS_MISSED_MAX = {missed};", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
