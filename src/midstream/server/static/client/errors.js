/** Errors of the client and refusals of the server. Their codes are stable. */

/** The `retry` of refusals that the same request always gets again. */
export const FINAL_RETRIES = new Set(["never", "ask"]);
/** The code of a refusal of the session's secret. */
export const WRONG_SECRET = "wrong_secret";
/** The code of a refusal that the same command always gets again, with any `retry`. */
export const SESSION_BUSY = "session_busy";
/** The code of the error of a server whose journal was cut, or replaced by an older copy. */
export const EVENTS_LOST = "events_lost";
/** Codes of errors after which the stream can be resumed: elsewhere, later, or when a person has changed something. */
export const KEEPS_CHECKPOINT = new Set([
  "access", "agent_mismatch", "connection_lost", EVENTS_LOST, "internal", "key_missing", "record_undecodable", "session_locked", "store_damaged",
  "stream_fenced", "unauthorized",
]);

/** A refusal of the server, or an error of the client. `code` is stable; `retry` is "never", "later", "now" or "ask". */
export class MidstreamError extends Error {
  constructor(code, message, retry = "never", retryAfterS = null) {
    super(message);
    this.name = "MidstreamError";
    this.code = code;
    this.retry = retry;
    this.retryAfterS = retryAfterS;
  }
}

/** Return the error of a lost connection. */
export const connectionLostError = (message, retryAfterS = null) => new MidstreamError("connection_lost", message, "later", retryAfterS);
/** Return the error of a server that breaks a rule of the protocol: its connection ends, and the next one resumes. */
export const protocolError = (message) => new MidstreamError("protocol", message);
