"""Generate the retry constants of the JavaScript client from `midstream.retries`.

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
        "Longest pause before the second reconnect. The first one has no pause; pauses are random.",
    ),
    (
        "RECONNECT_MOST_MS",
        retries.RECONNECT_BACKOFF.most_s,
        "Longest pause before any reconnect. Pauses double up to this.",
    ),
    ("RETRY_AFTER_MAX_MS", retries.RETRY_AFTER_MAX_S, "Longest pause that a server can request."),
    (
        "STOPPED_PATIENCE_MS",
        retries.STOPPED_PATIENCE_S,
        "Time for which a client reconnects for the end of a cancelled turn.",
    ),
    ("CONNECT_WITHIN_MS", retries.CONNECT_S, "Limit for the opening of a connection."),
    ("HEARTBEAT_MAX_MS", HEARTBEAT_S_MAX, "Longest accepted interval between heartbeats."),
)


def text() -> str:
    """Return the whole JavaScript module."""
    lines = ["/** Retry constants, generated from `src/midstream/retries.py` by `tools/retries_js.py`. */"]
    for name, seconds, meaning in CONSTANTS:
        lines += ["", f"/** {meaning} */", f"export const {name} = {round(seconds * 1000)};"]
    missed = retries.HEARTBEATS_MISSED_MAX
    lines += ["", "/** Missing heartbeats after which a connection counts as dead. */"]
    lines += [f"export const HEARTBEATS_MISSED_MAX = {missed};", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
