/**
 * Connections: WebSockets, and objects with the same interface, that carry frames.
 *
 * The owner of a connection sets `onopen`, `onmessage`, `onclose` and `onbytes`. A connection that receives frames in parts
 * calls `onbytes` for each part. A connection that ends with a known reason calls `onclose({error})`.
 */

import { MidstreamError, connectionLostError } from "./errors.js";

/** Prefix of the `type` of a problem detail from a midstream server. */
const PROBLEM_TYPE = "urn:midstream:error:";
/** Statuses below 500 after which the same request may succeed. */
const TEMPORARY = new Set([408, 421, 425, 429]);
/** Statuses from 500 on after which the same request never succeeds. */
const PERMANENT = new Set([501, 505]);

/** Close code of a WebSocket: a message was larger than the server, or a proxy, accepts (STREAM-111). */
const TOO_LARGE = 1009;

/** Return the error with which a connection ended; null if it was only lost. */
export function errorOfClose(event) {
  if (event?.code === TOO_LARGE) return new MidstreamError("frame_too_large", "a message is larger than the server or a proxy accepts");
  return event?.error ?? null;
}

/** Remove the handlers of a connection and close it. */
export function closeQuietly(connection) {
  if (connection === null) return;
  connection.onopen = connection.onmessage = connection.onclose = connection.onbytes = null;
  connection.close();
}

/** A connection that could not be made. It only reports its error. */
export class FailedConnection {
  onopen = null;
  onmessage = null;
  onclose = null;

  constructor(error) {
    queueMicrotask(() => this.onclose?.({ error }));
  }

  send() {}

  close() {}
}

/** Return the problem detail of a refusal; null if the response is not from a midstream server. */
export async function readProblem(answer) {
  const problem = await answer.json().catch(() => null);
  const isOurs = typeof problem?.code === "string" && String(problem.type).startsWith(PROBLEM_TYPE);
  return isOurs ? problem : null;
}

/**
 * Return the error of a refused HTTP request: the problem detail of a midstream server, else an error by the status. The
 * error has `isForeign` if the next transport may succeed (STREAM-107).
 */
export async function refusalOf(answer) {
  const problem = await readProblem(answer.clone());
  if (problem !== null) {
    const { code, detail = "", retry, retry_after_s = null } = problem;
    return new MidstreamError(code, detail, retry, retry_after_s);
  }
  const { status } = answer;
  if (answer.type === "opaqueredirect" || (status >= 300 && status < 400)) {
    const message = "the server redirects to another address, which is not followed. Use the address of the server itself";
    return Object.assign(new MidstreamError("protocol", message), { isForeign: true });
  }
  const message = `the connection was refused with HTTP status ${status}`;
  const isTemporary = TEMPORARY.has(status) || (status >= 500 && !PERMANENT.has(status));
  if (isTemporary) return connectionLostError(message, retryAfterOf(answer.headers.get("retry-after")));
  if (status === 401 || status === 407) return new MidstreamError("unauthorized", message);
  const code = { 403: "access", 451: "access", 404: "not_found", 410: "not_found" }[status] ?? "protocol";
  return Object.assign(new MidstreamError(code, message), { isForeign: true });
}

/** Return the seconds of a `Retry-After` header, or null. */
function retryAfterOf(value) {
  const seconds = value && (/^\d+$/.test(value) ? Number(value) : (Date.parse(value) - Date.now()) / 1000);
  return Number.isFinite(seconds) ? Math.max(0, seconds) : null;
}

/** Return `bytes` random bytes as base64url. */
export function randomText(bytes) {
  const random = crypto.getRandomValues(new Uint8Array(bytes));
  return btoa(String.fromCharCode(...random))
    .replaceAll("+", "-")
    .replaceAll("/", "_")
    .replaceAll("=", "");
}
