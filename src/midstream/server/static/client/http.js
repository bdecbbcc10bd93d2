/**
 * A connection over plain HTTP: frames go up one POST each, and come down by server-sent events or by long poll.
 *
 * One connection consists of several requests with the same connection name. No command is sent before the welcome
 * (STREAM-38), as a proxy may hold back the responses.
 *
 * A browser opens six connections to a host, for all tabs together. So at most `SLOTS` of these connections wait for
 * events at a time. The others poll once a second and leave connections free for commands.
 */

import { randomText, readProblem, refusalOf } from "./connections.js";
import { MidstreamError, connectionLostError } from "./errors.js";
import { CLOSE_FRAME } from "./frames.js";
import { acquireLock, hasLocks } from "./locks.js";
import { headersOf } from "./secrets.js";
import { SseDecoder } from "./sse.js";

/** Connections that may hold a connection of the browser without limit. */
const SLOTS = 4;
/** Seconds for which each other connection may hold one. */
const SHORT_POLL_S = 1;
/** Limit for the response to a POST: an append on a busy disk, over a bad network. */
const ANSWER_WITHIN_MS = 30_000;
const POLL_CHARS_MAX = 64 * 1024 * 1024;

/** A connection with the interface of a WebSocket, made of HTTP requests. */
export class HttpConnection {
  onopen = null;
  onmessage = null;
  onclose = null;
  onbytes = null;
  #address;
  #isPolling;
  #headers;
  #name = randomText(16);
  #opening = null; // the `open` frame, parsed
  #outgoing = [];
  #isSending = false;
  #isWelcome = false;
  #over = new AbortController();
  #slot = null; // releases the slot

  /**
   * @param address The address of the session: `…/v1/sessions/{id}`.
   * @param transport "sse" or "poll".
   * @param headers A function that returns, or promises, the headers that authenticate each request.
   */
  constructor(address, transport, headers = () => ({})) {
    this.#address = address;
    this.#isPolling = transport === "poll";
    this.#headers = headers;
    queueMicrotask(() => this.onopen?.({}));
  }

  send(frame) {
    if (this.#over.signal.aborted) return;
    if (this.#opening !== null) {
      this.#outgoing.push(frame);
      if (this.#isWelcome) this.#sendQueued();
      return;
    }
    this.#opening = JSON.parse(frame);
    this.#receive().then(
      () => this.#end(connectionLostError("the event stream ended before the turn")),
      (error) => this.#end(asConnectionError(error)),
    );
  }

  close() {
    const last = this.#outgoing.at(-1);
    this.onopen = this.onmessage = this.onclose = this.onbytes = null;
    this.#end(null);
    // Some proxies do not report closed connections to the server.
    if (this.#isWelcome && last === CLOSE_FRAME) this.#post(last, { keepalive: true }).catch(() => {});
  }

  // --- from the server ---

  async #receive() {
    this.#slot = await acquireSlot(new URL(this.#address).host);
    if (this.#over.signal.aborted) return this.#releaseSlot();
    if (this.#isPolling || this.#slot === null) return this.#poll();
    return this.#readEvents();
  }

  async #readEvents() {
    const answer = await this.#request("events", JSON.stringify(this.#opening), { accept: "text/event-stream" });
    if (!answer.headers.get("content-type")?.startsWith("text/event-stream"))
      throw connectionLostError("the answer is not an event stream of a midstream server");
    const decoder = new SseDecoder();
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      this.onbytes?.({});
      for (const frame of framesOf(decoder.feed(value))) this.#deliver(frame);
    }
  }

  async #poll() {
    let opening = this.#opening;
    for (let number = 0; ; number += 1) {
      const wait = this.#slot === null && number > 0 ? `&wait=${SHORT_POLL_S}` : "";
      const answer = await this.#request(`poll?n=${number}${wait}`, JSON.stringify(opening));
      const text = await answer.text();
      if (text.length > POLL_CHARS_MAX) throw connectionLostError("an answer is too large");
      const { frames, more } = JSON.parse(text);
      let after = opening.event_id;
      for (const frame of frames) {
        after = frame.events?.at(-1)?.id ?? frame.resume_from ?? (frame.type === "snapshot" ? frame.event_id : after);
        this.#deliver(JSON.stringify(frame));
      }
      if (!more || frames.length === 0) return;
      // The welcome has checked `next_seqno`. Later polls may arrive before the first command.
      opening = { ...opening, event_id: after, next_seqno: 0 };
    }
  }

  #deliver(frame) {
    if (this.#over.signal.aborted) return;
    this.onmessage?.({ data: frame });
    if (this.#isWelcome) return;
    this.#isWelcome = true;
    this.#sendQueued();
  }

  // --- to the server ---

  async #sendQueued() {
    if (this.#isSending) return;
    this.#isSending = true;
    try {
      while (this.#outgoing.length > 0 && !this.#over.signal.aborted) {
        const answer = await this.#post(this.#outgoing[0]);
        this.#outgoing.shift();
        if (answer !== null && !this.#over.signal.aborted) this.onmessage?.({ data: answer });
      }
    } catch (error) {
      this.#end(asConnectionError(error));
    }
    this.#isSending = false;
  }

  /** Send one frame; return the server's reply frame, or null. */
  async #post(frame, more = { signal: AbortSignal.any([this.#over.signal, AbortSignal.timeout(ANSWER_WITHIN_MS)]) }) {
    const { stream, secret = "", old_secret: oldSecret = "", connection } = this.#opening;
    const identity = { "x-idempotency-key": stream, "x-idempotency-connection": `${connection}` };
    const headers = { ...(stream ? identity : {}), ...headersOf({ secret, oldSecret }) };
    const answer = await this.#fetch("commands", frame, headers, { priority: "high", ...more });
    if (answer.status === 204) return null;
    if (answer.ok) return answer.text();
    const { type, seqno } = JSON.parse(frame);
    if (type !== "command") return null;
    const problem = await readProblem(answer.clone());
    if (problem === null) throw await refusalOf(answer);
    const { code, detail: message, retry, expected, retry_after_s } = problem;
    return JSON.stringify({ type: "error", code, message, retry, seqno, expected, retry_after_s });
  }

  // --- requests ---

  async #request(path, body, headers = {}) {
    const answer = await this.#fetch(path, body, headers, { signal: this.#over.signal });
    if (!answer.ok) throw await refusalOf(answer);
    return answer;
  }

  async #fetch(path, body, headers, more) {
    const common = { "content-type": "application/json", "x-midstream-connection": this.#name };
    const credentials = await this.#headers();
    return fetch(`${this.#address}/${path}`, {
      method: "POST",
      cache: "no-store",
      redirect: "manual", // the headers carry secrets for this server only
      headers: { ...credentials, ...headers, ...common },
      body,
      ...more,
    });
  }

  #end(error) {
    if (this.#over.signal.aborted) return;
    this.#over.abort();
    this.#releaseSlot();
    this.onclose?.({ error });
  }

  #releaseSlot() {
    this.#slot?.();
    this.#slot = null;
  }
}

/** Return events as frames. Consecutive records are in one `events` frame, as over a WebSocket. */
function framesOf(events) {
  const frames = [];
  let records = [];
  const flush = () => {
    if (records.length > 0) frames.push(`{"type":"events","events":[${records.join(",")}]}`);
    records = [];
  };
  for (const { id, type, data } of events) {
    if (type === "record") {
      records.push(`{"id":${JSON.stringify(id)},"record":${data}}`);
      continue;
    }
    flush();
    frames.push(data);
  }
  flush();
  return frames;
}

/** Return the error of a connection: a refusal of the server as it is, any other error as a lost connection. */
function asConnectionError(error) {
  return error instanceof MidstreamError ? error : connectionLostError(`the connection to the server broke (${error.cause?.code ?? error.name})`);
}

const slotsTaken = new Map(); // host -> slots that this page holds, for browsers without Web Locks

/** Acquire a slot of a host; return a function that releases it, or null if no slot is free. */
async function acquireSlot(host) {
  if (!hasLocks()) return acquireSlotOfPage(host);
  for (let number = 0; number < SLOTS; number += 1) {
    const release = await acquireLock(`midstream ${host} slot ${number}`, { ifAvailable: true });
    if (release !== null) return release;
  }
  return null;
}

function acquireSlotOfPage(host) {
  const count = slotsTaken.get(host) ?? 0;
  if (count >= SLOTS) return null;
  slotsTaken.set(host, count + 1);
  return () => slotsTaken.set(host, slotsTaken.get(host) - 1);
}
