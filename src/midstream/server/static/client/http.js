/**
 * A connection over plain HTTP: frames go up one POST each, and come down by server-sent events or by long poll.
 *
 * It is several requests, which show its name. Nothing is said before the server has welcomed it (STREAM-38): where
 * something in between holds the way down back, nothing went up.
 *
 * A browser has six connections to a host, over all tabs. So at most `PLACES` of these lines wait for news at a time;
 * the others ask once a second, and leave room for what is said.
 */

import { lostLine, problemIn, randomText, refusalOf } from "./lines.js";
import { headersOf } from "./secrets.js";
import { SseDecoder } from "./sse.js";
import { MidstreamError } from "./stream.js";

/** Lines that may hold a connection of the browser for as long as they like. */
const PLACES = 4;
/** Seconds for which any other one may. */
const SHORT_POLL_S = 1;
/** For a POST to be answered: an append on a busy disk, over a bad network. */
const ANSWER_WITHIN_MS = 30_000;
const POLL_CHARS_MAX = 64 * 1024 * 1024;

/** What a `LiveStream` takes for a WebSocket. */
export class HttpLine {
  onopen = null;
  onmessage = null;
  onclose = null;
  onheard = null;
  #address;
  #isPolling;
  #headers;
  #name = randomText(16);
  #opening = null; // the `open` frame, parsed
  #outgoing = [];
  #isPumping = false;
  #isWelcome = false;
  #over = new AbortController();
  #place = null; // how to give it back

  /**
   * @param address Of the session: `…/v1/sessions/{id}`.
   * @param transport "sse" or "poll".
   * @param headers Returns, or promises, what shows who asks.
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
      if (this.#isWelcome) this.#pump();
      return;
    }
    this.#opening = JSON.parse(frame);
    this.#follow().then(
      () => this.#end(lostLine("the event stream ended before the turn")),
      (error) => this.#end(asLost(error)),
    );
  }

  close() {
    const last = this.#outgoing.at(-1);
    this.onopen = this.onmessage = this.onclose = this.onheard = null;
    this.#end(null);
    // Some proxies keep quiet about who goes.
    if (this.#isWelcome && last === '{"type":"close"}') this.#post(last, { keepalive: true }).catch(() => {});
  }

  // --- down ---

  async #follow() {
    this.#place = await placeOf(new URL(this.#address).host);
    if (this.#over.signal.aborted) return this.#givePlaceBack();
    if (this.#isPolling || this.#place === null) return this.#poll();
    return this.#listen();
  }

  async #listen() {
    const answer = await this.#ask("events", JSON.stringify(this.#opening), { accept: "text/event-stream" });
    if (!answer.headers.get("content-type")?.startsWith("text/event-stream"))
      throw lostLine("the answer is not an event stream of a midstream server");
    const decoder = new SseDecoder();
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      this.onheard?.({});
      for (const frame of framesOf(decoder.feed(value))) this.#hear(frame);
    }
  }

  async #poll() {
    let opening = this.#opening;
    for (let number = 0; ; number += 1) {
      const wait = this.#place === null && number > 0 ? `&wait=${SHORT_POLL_S}` : "";
      const answer = await this.#ask(`poll?n=${number}${wait}`, JSON.stringify(opening));
      const text = await answer.text();
      if (text.length > POLL_CHARS_MAX) throw lostLine("an answer is too large");
      const { frames, more } = JSON.parse(text);
      let after = opening.event_id;
      for (const frame of frames) {
        after = frame.events?.at(-1)?.id ?? frame.resume_from ?? (frame.type === "snapshot" ? frame.event_id : after);
        this.#hear(JSON.stringify(frame));
      }
      if (!more || frames.length === 0) return;
      // The welcome has judged it; from here on the server may not have seen the first command yet.
      opening = { ...opening, event_id: after, next_seqno: 0 };
    }
  }

  #hear(frame) {
    if (this.#over.signal.aborted) return;
    this.onmessage?.({ data: frame });
    if (this.#isWelcome) return;
    this.#isWelcome = true;
    this.#pump();
  }

  // --- up ---

  async #pump() {
    if (this.#isPumping) return;
    this.#isPumping = true;
    try {
      while (this.#outgoing.length > 0 && !this.#over.signal.aborted) {
        const answer = await this.#post(this.#outgoing[0]);
        this.#outgoing.shift();
        if (answer !== null && !this.#over.signal.aborted) this.onmessage?.({ data: answer });
      }
    } catch (error) {
      this.#end(asLost(error));
    }
    this.#isPumping = false;
  }

  /** Send one frame; return the frame that answers it, or null. */
  async #post(frame, more = { signal: AbortSignal.any([this.#over.signal, AbortSignal.timeout(ANSWER_WITHIN_MS)]) }) {
    const { stream, secret = "", old_secret: oldSecret = "", connection } = this.#opening;
    const which = { "x-idempotency-key": stream, "x-idempotency-connection": `${connection}` };
    const shown = { ...(stream ? which : {}), ...headersOf({ secret, oldSecret }) };
    const answer = await this.#fetch("commands", frame, shown, { priority: "high", ...more });
    if (answer.status === 204) return null;
    if (answer.ok) return answer.text();
    const { type, seqno } = JSON.parse(frame);
    if (type !== "command") return null;
    const problem = await problemIn(answer.clone());
    if (problem === null) throw await refusalOf(answer);
    const { code, detail: message, retry, expected, retry_after_s } = problem;
    return JSON.stringify({ type: "error", code, message, retry, seqno, expected, retry_after_s });
  }

  // --- both ---

  async #ask(path, body, headers = {}) {
    const answer = await this.#fetch(path, body, headers, { signal: this.#over.signal });
    if (!answer.ok) throw await refusalOf(answer);
    return answer;
  }

  async #fetch(path, body, headers, more) {
    const named = { "content-type": "application/json", "x-midstream-connection": this.#name };
    const shown = await this.#headers();
    return fetch(`${this.#address}/${path}`, {
      method: "POST",
      cache: "no-store",
      redirect: "manual", // secrets are for this server
      headers: { ...shown, ...headers, ...named },
      body,
      ...more,
    });
  }

  #end(error) {
    if (this.#over.signal.aborted) return;
    this.#over.abort();
    this.#givePlaceBack();
    this.onclose?.({ error });
  }

  #givePlaceBack() {
    this.#place?.();
    this.#place = null;
  }
}

/** Return events as frames: records in a row in one `events` frame, as over a WebSocket. */
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

/** What the network or a reader of it throws is a lost connection; what a server refused is that. */
function asLost(error) {
  return error instanceof MidstreamError ? error : lostLine(`the connection to the server broke (${error.cause?.code ?? error.name})`);
}

const taken = new Map(); // host -> places of this page, where tabs cannot count together

/** Take a place of a host; return how to give it back, or null where all are taken. */
async function placeOf(host) {
  const locks = globalThis.navigator?.locks;
  if (!locks) return placeHere(host);
  for (let number = 0; number < PLACES; number += 1) {
    const release = await new Promise((resolve) => {
      const hold = (lock) => (lock === null ? resolve(null) : new Promise((release) => resolve(release)));
      locks.request(`midstream ${host} place ${number}`, { ifAvailable: true }, hold).catch(() => resolve(null));
    });
    if (release !== null) return release;
  }
  return null;
}

function placeHere(host) {
  const count = taken.get(host) ?? 0;
  if (count >= PLACES) return null;
  taken.set(host, count + 1);
  return () => taken.set(host, taken.get(host) - 1);
}
