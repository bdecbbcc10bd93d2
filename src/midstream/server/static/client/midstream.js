/**
 * The client for browsers: send a message and read the answer over an unreliable network.
 *
 *     const client = await connect({ url: location.origin });
 *     console.log(await client.ask("my-session", "Hello"));
 *     for await (const { transcript } of client.send("my-session", "And then?")) show(transcript);
 *
 * | module | content |
 * | --- | --- |
 * | stream.js | `Stream`: the client's half of the protocol, without I/O. It joins the next three, and smaller parts |
 * | command_outbox.js | `Outbox`: commands until their acks |
 * | event_inbox.js | `Inbox`: the position in the journal |
 * | link.js | `Link`: the phase of the connection, and its retries |
 * | live.js | `LiveStream`: does the I/O of one `Stream`, with one connection and one timer |
 * | answer.js | `AnswerText`: adds the answer so far to each event |
 * | transports.js | `TransportSelection`: finds the transport that works |
 * | http.js | `HttpConnection`: a connection made of HTTP requests, used like a WebSocket |
 * | shared.js | `SharedConnection`: one connection for several tabs |
 * | storage.js | `IndexedStorage`: data that survive a reload |
 * | secrets.js | `SessionSecrets`: the secret of each session |
 * | lifecycle.js | reactions to the lifecycle of the page |
 *
 * The client has no dependency and needs no build step. To use it elsewhere, copy this folder.
 */

import { randomText, refusalOf } from "./connections.js";
import { MidstreamError, connectionLostError } from "./errors.js";
import { bindToPage } from "./lifecycle.js";
import { LiveStream } from "./live.js";
import { acquireLock, hasLocks } from "./locks.js";
import { SessionSecrets, accessForViewer, headersOf, rootOf } from "./secrets.js";
import { settingsOf } from "./settings.js";
import { SharedConnection, canShare } from "./shared.js";
import { IndexedStorage, MemoryStorage, sortInterrupted } from "./storage.js";
import { Stream } from "./stream.js";
import { refuseBrokenText } from "./texts.js";
import { TRANSPORTS, TransportSelection } from "./transports.js";

export { AnswerText, TurnFailedError } from "./answer.js";
export { randomText } from "./connections.js";
export { MidstreamError } from "./errors.js";
export { PROTOCOL_VERSION, parseEventId } from "./frames.js";
export { LiveStream } from "./live.js";
export { LOOK_BACK_MS } from "./storage.js";
export { createTicketSocketFactory } from "./ticket.js";

/** A page that is being left releases its locks shortly after the next page begins. Another tab does not. */
const LOCK_WITHIN_MS = 500;
const CANCEL_AFTER_S_MAX = 3600;
/** Default lifetime of a viewer token. */
const VIEWER_FOR_S = 3600;

/** Storage for streams that must not be stored. */
const NO_STORAGE = { apply: async () => {} };

/** A monotonic clock and its timers. */
const CLOCK = {
  now: () => performance.now(),
  set: (act, milliseconds) => setTimeout(act, milliseconds),
  clear: (timer) => clearTimeout(timer),
};

/** The streams of this page at one server, and the stored streams of earlier pages. */
export class Client {
  #url;
  #storage;
  #headers;
  #secrets;
  #onstate;
  #live = new Map(); // LiveStream -> release of its lock
  #isDisconnected = false;
  #isReached; // this client or the browser received a response of the server at this address
  #hasWelcome = false; // a stream of this client received a welcome
  #environment;
  #settings;

  constructor({ url, storage, settings, onstate, isShared, clock, wall, chance, ...transportOptions }) {
    this.#url = url;
    this.#settings = settings;
    this.#storage = storage;
    this.#headers = transportOptions.headers ?? (() => ({}));
    this.#isReached = new URL(url).origin === globalThis.location?.origin;
    this.#secrets = new SessionSecrets(url, storage);
    this.#onstate = onstate;
    const selection = new TransportSelection({ url, ...transportOptions }, { clock, wall, storage });
    this.#environment = {
      url,
      storage,
      clock,
      wall,
      chance,
      dial: (session, key) => {
        const dial = () => selection.dial(session);
        return key || !isShared ? dial() : new SharedConnection(`${url} ${session}`, dial);
      },
      dialUnshared: (session) => selection.dial(session),
      notify: (stream) => {
        this.#hasWelcome ||= stream.connection.phase === "live";
        this.#isReached ||= this.#hasWelcome;
        this.#onstate(stream.connection, stream);
      },
      release: (stream) => {
        this.#live.get(stream)?.();
        this.#live.delete(stream);
      },
    };
  }

  /** Settings for streams that begin, or are resumed, from now on. */
  get settings() {
    return this.#settings;
  }

  /** Replace the settings. Settings that are not given get their default values. */
  set settings(given) {
    this.#settings = settingsOf(given);
  }

  /** Whether an unsent message survives a reload: false if the browser refuses IndexedDB. */
  get isDurable() {
    return this.#storage.isDurable;
  }

  /**
   * Send a message to a session. The stream delivers every event from here to the end of the turn. If the turn does not
   * complete, a loop over the stream throws `TurnFailedError` after the last event, as `answer()` does.
   *
   * `after` is the last event that the caller has of this session. All later events are delivered. Without `after`, events
   * begin with this stream, without those of earlier turns. While another turn runs, the message waits for its end. It is
   * refused if `whenBusy` is "refuse". With `cancelAfterS`, the server cancels the turn after that many seconds without a
   * connection.
   */
  send(session, text, { after = null, whenBusy = "queue", cancelAfterS = null } = {}) {
    if (cancelAfterS !== null && !(cancelAfterS >= 0 && cancelAfterS <= CANCEL_AFTER_S_MAX))
      throw new MidstreamError("usage", `cancelAfterS is ${cancelAfterS}; expected a number from 0 to ${CANCEL_AFTER_S_MAX}`);
    return this.#start({ session, cursor: after, cancelAfterS }, (stream, now) => stream.send(text, now, whenBusy));
  }

  /**
   * Send a message to a session and return the whole answer, each word once, also after lost connections. Rejects with
   * `TurnFailedError` if the turn does not complete, and with the server's error if it refuses the message.
   */
  async ask(session, text, { whenBusy = "queue", cancelAfterS = null } = {}) {
    return this.send(session, text, { whenBusy, cancelAfterS }).answer();
  }

  /** Resume the last turn, which was interrupted or failed. The stream delivers the rest of it. */
  resume(session, { turn = 0, after = null } = {}) {
    return this.#start({ session, cursor: after }, (stream, now) => stream.resume(turn, now));
  }

  /**
   * Continue a running turn that the server holds because its agent or its tools changed (`waitingOn` is "agent"), with the
   * agent that is served now. `turn` 0 is the turn that runs. Resolves when the request is in the journal.
   */
  async continueHeld(session, turn = 0) {
    const request = { method: "POST", headers: { "x-midstream": "1" } };
    await this.#requestOk(session, turn ? `/resume?turn=${turn}` : "/resume", request);
  }

  /**
   * Answer an open question; `question` is a `question_asked` record. For a question of a sub-agent, `session` is the
   * `child` of the `child_delta` with the question. Resolves when the answer is in the journal.
   */
  async answer(session, question, choice, { text = "", argumentsJson = null } = {}) {
    const { turn, response, call_id, digest } = question;
    const answer = { turn, response, call_id, digest, choice };
    if (text) answer.text = text;
    if (argumentsJson !== null) answer.arguments = argumentsJson;
    return this.#sendAlone(session, (stream, now) => stream.answer(answer, now));
  }

  /** Withdraw the queued message `number`, or all queued messages. Resolves when that is in the journal. */
  async withdraw(session, number = 0) {
    return this.#sendAlone(session, (stream, now) => stream.withdraw(number, now));
  }

  /**
   * Follow a session without sending commands: read the events after `after`, or from now on. A `viewerToken`, from
   * another client's `createViewerToken`, is sent in the place of the session's secret.
   */
  follow(session, after = null, { viewerToken = "" } = {}) {
    const stream = this.#stream({ session, cursor: after });
    if (!viewerToken) return this.#run(stream, this.#secrets.accessForReader(session));
    // The token may expire before the access of other tabs does. So this reader shares no connection with them.
    const environment = { ...this.#environment, dial: this.#environment.dialUnshared };
    return this.#run(stream, accessForViewer(viewerToken), { environment });
  }

  /**
   * Cancel `turn`, or the turn that runs, of any client. Resolves when the request is in the journal, or when the turn has
   * ended.
   */
  async cancel(session, turn = 0) {
    const isOwn = (live) => live.session === session && live.key && live.isActive && !live.isQueued;
    const own = [...this.#live.keys()].find((live) => isOwn(live) && (!turn || live.turn === turn));
    if (own) return own.abort();
    return this.#sendAlone(session, (core, now) => core.abort(turn, now));
  }

  /**
   * Resume the streams that a reload or a crash interrupted. Delete streams that are older than the look-back, unless a
   * tab still holds them. If recovery is off (`settings`), resume and delete nothing.
   *
   * With `session`, only streams of that session are resumed. Events begin after `after`, by default after the stored
   * cursor. Streams that another tab holds are not resumed. Throws "storage" (with `retry` "later") if another tab blocks
   * the database.
   */
  async resumeInterrupted({ session, after, lookBackS = this.#settings.lookBackS } = {}) {
    if (!this.#settings.isRecoveryOn) return [];
    const { interrupted, orphans } = await this.#loadInterrupted(1000 * lookBackS);
    const held = new Set([...this.#live.keys()].map((live) => live.key));
    await this.#deleteUnheld(orphans.filter((key) => !held.has(key)));
    const isWanted = (stored) => stored.url === this.#url && (session === undefined || stored.session === session);
    const wanted = interrupted.filter((stored) => isWanted(stored) && !held.has(stored.key));
    const releases = await Promise.all(wanted.map((stored) => lockOf(stored.key)));
    const resumed = [];
    for (const [index, stored] of wanted.entries()) {
      if (releases[index] === null) continue;
      const begun = after === undefined ? {} : { cursor: after, isWhole: after !== null };
      const stream = this.#stream({ ...stored, ...begun });
      resumed.push(this.#run(stream, this.#secrets.accessForReader(stored.session), { release: releases[index] }));
    }
    return resumed;
  }

  /**
   * Return the first stored message for `session` that no server has acknowledged, or null. The result is
   * `{key, text, stream}`; `stream` is the stream of this page that sends the message, or null.
   */
  async findUnsent(session) {
    const { interrupted } = await this.#loadInterrupted();
    for (const stored of interrupted) {
      if (stored.url !== this.#url || stored.session !== session) continue;
      const text = stored.damage ? null : new Stream(stored).pendingText;
      const stream = [...this.#live.keys()].find((live) => live.key === stored.key) ?? null;
      if (text !== null) return { key: stored.key, text, stream };
    }
    return null;
  }

  /** Request `/v1/sessions/{session}{path}` with `fetch`, the session's secret and the headers of this client. */
  async fetch(session, path = "", { headers = {}, ...more } = {}) {
    return this.#request(session, path, { headers, ...more }, await this.#secrets.read(session));
  }

  /**
   * Return the secret of a session, for `keepSecret` of another client of the same person. A session without a secret gets
   * one. Do not log the secret, and do not send it to other receivers.
   */
  async secret(session) {
    return (await this.#secrets.readOrCreate(session)).secret;
  }

  /** Store this secret of a session and use it from now on. */
  async keepSecret(session, secret) {
    this.#showSecrets(session, await this.#secrets.keep(session, secret));
  }

  /**
   * Replace the secret of a session; resolves when the server has the new one on disk. If the call is interrupted, this
   * client sends both secrets until the next call, and one of them opens the session.
   */
  async changeSecret(session) {
    const both = await this.#secrets.beginChange(session);
    this.#showSecrets(session, both);
    await this.#requestOk(session, "", {}, both);
    await this.#secrets.endChange(session, both.secret);
  }

  /** Delete the secret of a session. If no other client has the secret, the session can never be opened again. */
  async discardSecret(session) {
    await this.#secrets.discard(session);
  }

  /** Return a viewer token. For `forS` seconds every holder of it can read the session with `follow`, and do nothing else. */
  async createViewerToken(session, { forS = VIEWER_FOR_S } = {}) {
    const body = JSON.stringify({ for_s: forS });
    const request = { method: "POST", headers: { "content-type": "application/json" }, body };
    const { token } = await (await this.#requestOk(session, "/viewers", request)).json();
    return token;
  }

  /** Invalidate all viewer tokens of a session. */
  async revokeViewerTokens(session) {
    await this.#requestOk(session, "/viewers", { method: "DELETE" });
  }

  /** Close every connection, like a lost network. None is made again for `forMs`. */
  cut(forMs = 0) {
    for (const stream of [...this.#live.keys()]) stream.cut(forMs);
  }

  /** Make every waiting connection at once, and test the open ones. */
  wake() {
    for (const stream of [...this.#live.keys()]) stream.wake();
  }

  /** Close all connections until `reconnect`, as the browser freezes this page. Other tabs may resume its streams. */
  disconnect() {
    this.#isDisconnected = true;
    for (const stream of [...this.#live.keys()]) {
      stream.disconnect();
      this.#live.get(stream)?.();
      this.#live.set(stream, () => {});
    }
  }

  /** Reconnect after `disconnect`, except streams that another tab has resumed. */
  async reconnect() {
    if (!this.#isDisconnected) return;
    this.#isDisconnected = false;
    for (const stream of [...this.#live.keys()]) {
      if (!stream.key) stream.reconnect();
      else this.#reconnectStream(stream, await lockOf(stream.key, { ifAvailable: true }));
    }
  }

  #reconnectStream(stream, release) {
    if (release === null) return stream.endWith(new MidstreamError("stream_fenced", "another tab has resumed the stream"));
    if (this.#isDisconnected || !this.#live.has(stream)) return release();
    this.#live.set(stream, release);
    return stream.reconnect();
  }

  /** Detach every stream. Stored streams stay for `resumeInterrupted`. */
  close() {
    for (const stream of [...this.#live.keys()]) stream.detach();
  }

  #start(begun, first) {
    const access = this.#secrets.accessForStream(begun.session);
    const stream = this.#stream({ key: randomText(16), secret: access.own, ...begun });
    first(stream, this.#now());
    const lock = lockOf(stream.key);
    const release = () => lock.then((free) => free?.());
    const environment = this.#settings.isRecoveryOn ? this.#environment : { ...this.#environment, storage: NO_STORAGE };
    return this.#run(stream, access, { release, environment });
  }

  /** Send a command on a stream of its own, which ends with the ack. */
  #sendAlone(session, first) {
    const stream = this.#start({ session }, first);
    stream.abandon();
    return stream.accepted;
  }

  /** Sort the stored streams. If a page died during its first write, the stream has no secret, but its session has one. */
  async #loadInterrupted(lookBackMs = 1000 * this.#settings.lookBackS) {
    const { streams, secrets, commands } = await this.#storage.load();
    const whole = new Set(secrets.map(({ key }) => key));
    for (const { key, session, url } of streams) {
      if (whole.has(key) || url !== this.#url) continue;
      const { secret } = await this.#secrets.read(session);
      if (secret) secrets.push({ key, secret });
    }
    return sortInterrupted({ streams, secrets, commands }, this.#environment.wall(), lookBackMs);
  }

  /** Delete the streams that no tab holds. A tab that holds an old stream may still wait for a person. */
  async #deleteUnheld(keys) {
    const releases = await Promise.all(keys.map((key) => lockOf(key, { ifAvailable: true })));
    const free = keys.filter((_, index) => releases[index] !== null);
    if (free.length > 0) await this.#storage.apply(free.map((key) => ({ op: "delete", key })));
    for (const release of releases) release?.();
  }

  /** Use these secrets for the next connections of all streams of a session. */
  #showSecrets(session, secrets) {
    for (const stream of this.#live.keys()) if (rootOf(stream.session) === rootOf(session)) stream.showSecrets(secrets);
  }

  /** Send a request about a session; throw if the server refuses it. */
  async #requestOk(session, path, request, secrets = null) {
    const shown = secrets ?? (await this.#secrets.read(session));
    const answer = await this.#request(session, path, request, shown).catch((error) => {
      throw connectionLostError(`the server did not answer (${error.name})`);
    });
    if (!answer.ok) throw await refusalOf(answer);
    return answer;
  }

  async #request(session, path, { headers, ...options }, secrets) {
    const address = `${this.#url}/v1/sessions/${encodeURIComponent(session)}${path}`;
    const all = { ...(await this.#headers()), ...headersOf(secrets), ...headers };
    return fetch(address, { cache: "no-store", redirect: "manual", ...options, headers: all });
  }

  #now() {
    return this.#environment.clock.now();
  }

  #stream(begun) {
    if (typeof begun.session !== "string") throw new MidstreamError("usage", `the id of a session is a ${typeof begun.session}; expected a string`);
    if (!begun.session) throw new MidstreamError("usage", "a session needs an id of at least one character");
    refuseBrokenText(begun.session);
    const { patienceS, reachWithinS, stallAfterS } = this.#settings;
    const reachWithinMs = this.#isReached ? Infinity : 1000 * reachWithinS;
    const limits = { patienceMs: 1000 * patienceS, stallAfterMs: 1000 * stallAfterS, reachWithinMs };
    return new Stream(begun, this.#now(), { ...limits, isReached: this.#hasWelcome });
  }

  #run(stream, access, { release = () => {}, environment = this.#environment } = {}) {
    const live = new LiveStream(stream, environment, access);
    this.#live.set(live, release);
    return live;
  }
}

/**
 * Return a client of the server at `url`, by default the server of the page. See `ConnectOptions` in midstream.d.ts.
 * `storage`, `clock`, `wall` and `chance` are for tests.
 */
export async function connect({ url = "", transport = "auto", ...other } = {}) {
  if (transport !== "auto" && !TRANSPORTS.includes(transport))
    throw new MidstreamError("usage", `the transport is '${transport}'; expected auto, ${TRANSPORTS.join(", ")}`);
  const client = new Client({
    url: addressOf(url),
    transport,
    settings: settingsOf(other.settings),
    headers: other.headers ?? null,
    makeSocket: other.makeSocket ?? null,
    onstate: other.onstate ?? (() => {}),
    storage: other.storage ?? (await IndexedStorage.open().catch(() => new MemoryStorage())),
    isShared: (other.isShared ?? true) && canShare(),
    clock: other.clock ?? CLOCK,
    wall: other.wall ?? Date.now,
    chance: other.chance ?? Math.random,
  });
  if (other.oninterrupted) await resumeEach(client, other.oninterrupted);
  if (typeof document !== "undefined") bindToPage(client);
  return client;
}

/** Return the address of a server without a slash at its end. A path belongs to the server of the page. */
function addressOf(url) {
  const here = globalThis.location?.origin;
  try {
    const { protocol, host, pathname } = new URL(url, here === "null" ? undefined : here);
    const scheme = { "http:": "http", "https:": "https", "ws:": "http", "wss:": "https" }[protocol];
    if (scheme && host) return `${scheme}://${host}${pathname.replace(/\/+$/, "")}`;
  } catch {
    // reported below
  }
  throw new MidstreamError("usage", `the address of the server is '${url}'; expected 'https://host' or '/path'`);
}

/** Call `oninterrupted` with each interrupted stream, concurrently. The page handles its errors. */
async function resumeEach(client, oninterrupted) {
  try {
    // From the first event, as this page has displayed none of them.
    for (const stream of await client.resumeInterrupted({ after: null })) (async () => oninterrupted(stream))();
  } catch (error) {
    if (error.retry !== "later") throw error;
    resumeEach(client, oninterrupted); // again when the database is readable; `connect` does not wait for it
  }
}

/**
 * Lock a stream for this tab. Return a function that releases it, or null if another tab has the stream. Without Web Locks
 * nothing is locked: the server fences the older connection.
 */
function lockOf(key, options = { signal: AbortSignal.timeout(LOCK_WITHIN_MS) }) {
  return hasLocks() ? acquireLock(`midstream ${key}`, options) : Promise.resolve(() => {});
}
