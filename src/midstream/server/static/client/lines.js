/**
 * A line is what carries the frames of one connection: a WebSocket, or something that behaves like one.
 *
 * Its owner sets `onopen`, `onmessage`, `onclose`, and `onheard` where parts of a frame can be told from silence. A line
 * that ends says why, where it knows: `onclose({error})`.
 */

import { MidstreamError } from "./stream.js";

/** What the `type` of a problem begins with where a server of ours refuses. */
const PROBLEM_TYPE = "urn:midstream:error:";
/** Statuses after which the same request may succeed, as after those from 500 on but for these two. */
const TRY_AGAIN = new Set([408, 421, 425, 429]);
const NEVER_THERE = new Set([501, 505]);

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

/** Return the problem that a refusal of our server's is; null where somebody in between says something else. */
export async function problemIn(answer) {
  const problem = await answer.json().catch(() => null);
  const isOurs = typeof problem?.code === "string" && String(problem.type).startsWith(PROBLEM_TYPE);
  return isOurs ? problem : null;
}

/**
 * Return what an HTTP refusal means: the server's own words where it is ours, else what its status says; `isForeign`
 * where the next transport may fare better (STREAM-107).
 */
export async function refusalOf(answer) {
  const problem = await problemIn(answer.clone());
  if (problem !== null) {
    const { code, detail = "", retry, retry_after_s = null } = problem;
    return new MidstreamError(code, detail, retry, retry_after_s);
  }
  const { status } = answer;
  if (answer.type === "opaqueredirect" || (status >= 300 && status < 400)) {
    const message = "the server redirects to another address; none is followed: give the address of the server itself";
    return Object.assign(new MidstreamError("protocol", message), { isForeign: true });
  }
  const message = `the connection was refused with HTTP status ${status}`;
  const mayPass = TRY_AGAIN.has(status) || (status >= 500 && !NEVER_THERE.has(status));
  if (mayPass) return lostLine(message, waitOf(answer.headers.get("retry-after")));
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
