/**
 * A line is what carries the frames of one connection: a WebSocket, or something that behaves like one.
 *
 * Its owner sets `onopen`, `onmessage`, `onclose`, and `onheard` where parts of a frame can be told from silence. A line
 * that ends says why, where it knows: `onclose({error})`.
 */

import { MidstreamError } from "./stream.js";

/** Statuses after which the same request may succeed. */
const TRY_AGAIN = new Set([408, 421, 425, 429, 500, 502, 503, 504]);

/** Hear no more of a line, and close it. */
export function letGo(line) {
  if (line === null) return;
  line.onopen = line.onmessage = line.onclose = line.onheard = null;
  line.close();
}

/** A line that could not be made. */
export class BrokenLine {
  onopen = null;
  onmessage = null;
  onclose = null;

  constructor(error) {
    queueMicrotask(() => this.onclose?.({ error }));
  }

  send() {}

  close() {}
}

/**
 * Return what an HTTP refusal means: the server's own words where it is ours, else what its status says; `isForeign`
 * where the next transport may fare better.
 */
export async function refusalOf(answer) {
  const problem = await answer.json().catch(() => null);
  const { code, detail = "", retry, retry_after_s = null } = problem ?? {};
  if (typeof code === "string") return new MidstreamError(code, detail, retry, retry_after_s);
  const { status } = answer;
  const message = `the connection was refused with HTTP status ${status}`;
  if (TRY_AGAIN.has(status)) return lostLine(message, waitOf(answer.headers.get("retry-after")));
  if (status === 401 || status === 407) return new MidstreamError("unauthorized", message);
  const told = { 403: "access", 451: "access", 404: "not_found", 410: "not_found" }[status] ?? "protocol";
  return Object.assign(new MidstreamError(told, message), { isForeign: true });
}

/** Return the error of a line that broke. */
export function lostLine(message, retryAfterS = null) {
  return new MidstreamError("connection_lost", message, "later", retryAfterS);
}

/** Return the seconds that a `Retry-After` asks for, or null. */
function waitOf(said) {
  const seconds = said && (/^\d+$/.test(said) ? Number(said) : (Date.parse(said) - Date.now()) / 1000);
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
