/** Retry constants, generated from `src/midstream/retries.py` by `tools/retries_js.py`. */

/** Longest pause before the second reconnect. The first one has no pause; pauses are random. */
export const RECONNECT_FIRST_MS = 1000;

/** Longest pause before any reconnect. Pauses double up to this. */
export const RECONNECT_MOST_MS = 30000;

/** Longest pause that a server can request. */
export const RETRY_AFTER_MAX_MS = 120000;

/** Time for which a client reconnects for the end of a cancelled turn. */
export const STOPPED_PATIENCE_MS = 30000;

/** Limit for the opening of a connection. */
export const CONNECT_WITHIN_MS = 10000;

/** Longest accepted interval between heartbeats. */
export const HEARTBEAT_MAX_MS = 300000;

/** Missing heartbeats after which a connection counts as dead. */
export const HEARTBEATS_MISSED_MAX = 3;
