/** Retry constants, generated from `src/midstream/retries.py` by `tools/retries_js.py`. */

/** Longest pause before the second reconnect; the first one is made at once, and chance decides the rest. */
export const RECONNECT_FIRST_MS = 1000;

/** Longest pause before any reconnect: it doubles up to this. */
export const RECONNECT_MOST_MS = 30000;

/** Longest pause that a server can ask for. */
export const RETRY_AFTER_MAX_MS = 120000;

/** How long the end of a stopped turn is tried for. */
export const STOPPED_PATIENCE_MS = 30000;

/** Longest interval between heartbeats that is accepted. */
export const HEARTBEAT_MAX_MS = 300000;

/** Missing heartbeats before a connection counts as dead. */
export const HEARTBEATS_MISSED_MAX = 3;
