/**
 * midstream for browsers: send a message, read the answer, survive the network.
 *
 *     const client = await connect({ url: location.origin });
 *     console.log(await client.ask("my-session", "Hello"));
 *     for await (const { transcript } of client.send("my-session", "And then?")) show(transcript);
 *
 * Theory of operation. `Stream` (stream.js) is the client's half of the protocol and does nothing by itself: it
 * is told of connections, frames and time, and says what to write down, send and deliver. `LiveStream` (live.js) owns
 * one `Stream`, one line at a time and one timer, and obeys; `AnswerText` (answer.js) adds to each event the answer so
 * far. A line is a WebSocket or behaves like one: `HttpLine` (http.js) is several requests, `TransportSelection` (transports.js) finds the one that gets through, `SharedLine` (shared.js) is another
 * tab's. `IndexedStorage` (storage.js) keeps what must survive a reload, `SessionSecrets` (secrets.js) says by which secret
 * a session is opened, and lifecycle.js tells what browsers do to pages that nobody looks at.
 *
 * No dependency and no build step: to use it elsewhere, copy this folder.
 */

import { whileAlive } from "./lifecycle.js";
import { lostLine, randomText, refusalOf } from "./lines.js";
import { LiveStream } from "./live.js";
import { SessionSecrets, headersOf, ofViewer, rootOf } from "./secrets.js";
import { settingsOf } from "./settings.js";
import { SharedLine, canShare } from "./shared.js";
import { IndexedStorage, MemoryStorage, sortInterrupted } from "./storage.js";
import { MidstreamError, Stream } from "./stream.js";
import { refuseBrokenText } from "./texts.js";
import { TRANSPORTS, Ways } from "./transports.js";

export { AnswerText, TurnFailedError } from "./answer.js";
export { randomText } from "./lines.js";
export { LiveStream } from "./live.js";
export { LOOK_BACK_MS } from "./storage.js";
export { ticketed } from "./ticket.js";
export { MidstreamError, PROTOCOL_VERSION, parseEventId } from "./stream.js";

/** A page that was left gives its streams up a moment after the next one begins; another tab keeps them. */
const LOCK_WITHIN_MS = 500;
const CANCEL_AFTER_S_MAX = 3600;
/** For as long a word to look lasts, where nobody says otherwise. */
const LOOK_FOR_S = 3600;

/** Where a stream is kept that is not to be. */
const NOWHERE = { apply: async () => {} };

/** A clock that is never set, and its timers. */
const CLOCK = {
  now: () => performance.now(),
  set: (act, milliseconds) => setTimeout(act, milliseconds),
  clear: (timer) => clearTimeout(timer),
};

/** A connection to one server: its streams, and what is kept of them. */
export class Client {
  #url;
  #storage;
  #headers;
  #secrets;
  #onstate;
  #live = new Map(); // LiveStream -> release of its lock
  #isResting = false;
  #isReached; // a server was heard at this address, by this client or as the page was loaded
  #means;
  #settings;

  constructor({ url, storage, settings, onstate, isShared, clock, wall, chance, ...ways }) {
    this.#url = url;
    this.#settings = settings;
    this.#storage = storage;
    this.#headers = ways.headers ?? (() => ({}));
    this.#isReached = new URL(url).origin === globalThis.location?.origin;
    this.#secrets = new SessionSecrets(url, storage);
    this.#onstate = onstate;
    const reach = new Ways({ url, ...ways }, { clock, wall, storage });
    this.#means = {
      url,
      storage,
      clock,
      wall,
      chance,
      dial: (session, key) => {
        const dial = () => reach.dial(session);
        return key || !isShared ? dial() : new SharedLine(`${url} ${session}`, dial);
      },
      dialAlone: (session) => reach.dial(session),
      notify: (stream) => {
        this.#isReached ||= stream.connection.phase === "live";
        this.#onstate(stream.connection, stream);
      },
      release: (stream) => {
        this.#live.get(stream)?.();
        this.#live.delete(stream);
      },
    };
  }

  /** What is kept of streams that begin, or are resumed, from now on, and for how long what is waited for. */
  get settings() {
    return this.#settings;
  }

  /** Others than these are as they are by default. */
  set settings(given) {
    this.#settings = settingsOf(given);
  }

  /** Whether an unsent message survives a reload: false where the browser refuses IndexedDB. */
  get isDurable() {
    return this.#storage.isDurable;
  }

  /**
   * Say something in a session; the stream gives every event from here to the turn's end. A loop over it throws
   * `TurnFailedError` after the last event of a turn that did not complete, as `answer()` does.
   *
   * `after` is the last event the caller has of this session: it is given all that follows. Without it events begin with
   * this stream, and those of turns before its own are left out. While a turn runs, the message waits for its end, or is
   * refused where `whenBusy` is "refuse". With `cancelAfterS` the turn is stopped where the connection is lost, and not
   * made again, for so many seconds.
   */
  send(session, text, { after = null, whenBusy = "queue", cancelAfterS = null } = {}) {
    if (cancelAfterS !== null && !(cancelAfterS >= 0 && cancelAfterS <= CANCEL_AFTER_S_MAX))
      throw new MidstreamError("usage", `cancelAfterS is a number from 0 to ${CANCEL_AFTER_S_MAX}`);
    return this.#start({ session, cursor: after, cancelAfterS }, (stream, now) => stream.say(text, now, whenBusy));
  }

  /**
   * Say something in a session and return the whole answer, each word once, whatever broke meanwhile. Rejects with
   * `TurnFailedError` where the turn ended otherwise, and with what the server refused.
   */
  async ask(session, text, { whenBusy = "queue", cancelAfterS = null } = {}) {
    return this.send(session, text, { whenBusy, cancelAfterS }).answer();
  }

  /** Go on with the last turn, which was interrupted or failed; the stream gives the rest of it. */
  resume(session, { turn = 0, after = null } = {}) {
    return this.#start({ session, cursor: after }, (stream, now) => stream.resume(turn, now));
  }

  /**
   * Continue a running turn that the server holds because its agent or its tools changed (`waitingOn` is "agent"), with the
   * agent that is served now. `turn` 0 is whichever runs. Resolves when that is in the journal.
   */
  async continueHeld(session, turn = 0) {
    const wish = { method: "POST", headers: { "x-midstream": "1" } };
    await this.#told(session, turn ? `/resume?turn=${turn}` : "/resume", wish);
  }

  /**
   * Answer an open question: `question` is a `question_asked` record. For one of a sub-agent, `session` is the
   * `child` of the `child_delta` that told of it. Resolves when the answer is in the journal.
   */
  async answer(session, question, choice, { text = "", argumentsJson = null } = {}) {
    const { turn, response, call_id, digest } = question;
    const answer = { turn, response, call_id, digest, choice };
    if (text) answer.text = text;
    if (argumentsJson !== null) answer.arguments = argumentsJson;
    return this.#tell(session, (stream, now) => stream.answer(answer, now));
  }

  /** Take back the queued message `number`, or all that wait. Resolves when that is in the journal. */
  async withdraw(session, number = 0) {
    return this.#tell(session, (stream, now) => stream.withdraw(number, now));
  }

  /**
   * Follow a session without saying anything: events after `after`, or from now on. `word`, from another client's
   * `letLook`, is shown in the place of the session's secret.
   */
  follow(session, after = null, { word = "" } = {}) {
    const stream = this.#stream({ session, cursor: after });
    if (!word) return this.#run(stream, this.#secrets.ofReader(session));
    // Its time may end before that of the other tabs: it hears nothing through them.
    const means = { ...this.#means, dial: this.#means.dialAlone };
    return this.#run(stream, ofViewer(word), { means });
  }

  /**
   * Stop the session's turn, whoever began it: `turn`, or whichever runs. Resolves when the request is in the
   * journal, or the turn over.
   */
  async cancel(session, turn = 0) {
    const isOwn = (live) => live.session === session && live.key && live.isHeard && !live.isQueued;
    const own = [...this.#live.keys()].find((live) => isOwn(live) && (!turn || live.turn === turn));
    if (own) return own.abort();
    return this.#tell(session, (core, now) => core.abort(turn, now));
  }

  /**
   * Take up the streams that a reload or a crash interrupted, and forget those past the look-back that no tab holds.
   * Where recovery is switched off (`settings`) there are none, and nothing is forgotten.
   *
   * `session` takes only that session's; `after` is where its events begin: the stored cursor if absent.
   * Streams that another tab holds are left to it. Throws "storage" (with `retry` "later") where another tab hangs and does
   * not let this one read.
   */
  async resumeInterrupted({ session, after, lookBackS = this.#settings.lookBackS } = {}) {
    if (!this.#settings.isRecoveryOn) return [];
    const { interrupted, orphans } = await this.#kept(1000 * lookBackS);
    const held = new Set([...this.#live.keys()].map((live) => live.key));
    await this.#clear(orphans.filter((key) => !held.has(key)));
    const isWanted = (kept) => kept.url === this.#url && (session === undefined || kept.session === session);
    const wanted = interrupted.filter((kept) => isWanted(kept) && !held.has(kept.key));
    const releases = await Promise.all(wanted.map((kept) => lockOf(kept.key)));
    const resumed = [];
    for (const [index, kept] of wanted.entries()) {
      if (releases[index] === null) continue;
      const begun = after === undefined ? {} : { cursor: after, isWhole: after !== null };
      const stream = this.#stream({ ...kept, ...begun });
      resumed.push(this.#run(stream, this.#secrets.ofReader(kept.session), { release: releases[index] }));
    }
    return resumed;
  }

  /**
   * Return the first message kept here for `session` that no server has acknowledged, or null: {key, text, stream},
   * where `stream` is the one of this page that sends it, or null.
   */
  async unsent(session) {
    const { interrupted } = await this.#kept();
    for (const kept of interrupted) {
      if (kept.url !== this.#url || kept.session !== session) continue;
      const text = kept.damage ? null : new Stream(kept).pendingText;
      const stream = [...this.#live.keys()].find((live) => live.key === kept.key) ?? null;
      if (text !== null) return { key: kept.key, text, stream };
    }
    return null;
  }

  /** Ask the server about a session: `fetch` of `/v1/sessions/{session}{path}` with what opens it and shows who asks. */
  async fetch(session, path = "", { headers = {}, ...more } = {}) {
    return this.#ask(session, path, { headers, ...more }, await this.#secrets.known(session));
  }

  /**
   * Return the secret of a session, for another client of the same person, which is told it by `keepSecret`; one is drawn
   * if there is none. It is not to be logged, or sent anywhere else.
   */
  async secret(session) {
    return (await this.#secrets.made(session)).secret;
  }

  /** Use this secret for a session from now on. */
  async keepSecret(session, secret) {
    this.#show(session, await this.#secrets.keep(session, secret));
  }

  /**
   * Let another secret open a session, and the one so far no more; resolves when the server has it on disk. Where it is cut
   * short, both are shown until it is called again, and one of them opens the session.
   */
  async changeSecret(session) {
    const both = await this.#secrets.beginChange(session);
    this.#show(session, both);
    await this.#told(session, "", {}, both);
    await this.#secrets.endChange(session, both.secret);
  }

  /** Keep and show the secret of a session no more: where no other client has it, nobody opens that ever again. */
  async discardSecret(session) {
    await this.#secrets.discard(session);
  }

  /** Return a word with which anybody may look at a session, and no more, for `forS` seconds: see `follow`. */
  async letLook(session, { forS = LOOK_FOR_S } = {}) {
    const body = JSON.stringify({ for_s: forS });
    const wish = { method: "POST", headers: { "content-type": "application/json" }, body };
    const { word } = await (await this.#told(session, "/viewers", wish)).json();
    return word;
  }

  /** Let none of the words for a session be good any more. */
  async withdrawViewers(session) {
    await this.#told(session, "/viewers", { method: "DELETE" });
  }

  /** Cut every connection as a lost network would; `forMs` keeps it away for that long. */
  cut(forMs = 0) {
    for (const stream of [...this.#live.keys()]) stream.cut(forMs);
  }

  /** Try every waiting connection at once. */
  wake() {
    for (const stream of [...this.#live.keys()]) stream.wake();
  }

  /** Have no connection until `goOn`: the browser puts this page to sleep. Other tabs may take up what it leaves. */
  rest() {
    this.#isResting = true;
    for (const stream of [...this.#live.keys()]) {
      stream.rest();
      this.#live.get(stream)?.();
      this.#live.set(stream, () => {});
    }
  }

  /** Go on after `rest`, but for streams that another tab has taken up. */
  async goOn() {
    if (!this.#isResting) return;
    this.#isResting = false;
    for (const stream of [...this.#live.keys()]) {
      if (!stream.key) stream.goOn();
      else this.#goOnWith(stream, await lockOf(stream.key, { ifAvailable: true }));
    }
  }

  #goOnWith(stream, release) {
    if (release === null) return stream.yieldTo(new MidstreamError("stream_fenced", "another tab has taken it up"));
    if (this.#isResting || !this.#live.has(stream)) return release();
    this.#live.set(stream, release);
    return stream.goOn();
  }

  /** Let go of every stream; what is written down stays for `resumeInterrupted`. */
  close() {
    for (const stream of [...this.#live.keys()]) stream.leave();
  }

  #start(begun, first) {
    const opener = this.#secrets.ofStream(begun.session);
    const stream = this.#stream({ key: randomText(16), secret: opener.own, ...begun });
    first(stream, this.#now());
    const lock = lockOf(stream.key);
    const release = () => lock.then((free) => free?.());
    const means = this.#settings.isRecoveryOn ? this.#means : { ...this.#means, storage: NOWHERE };
    return this.#run(stream, opener, { release, means });
  }

  /** Say something on a stream of its own that is over with its ack. */
  #tell(session, first) {
    const stream = this.#start({ session }, first);
    stream.detach();
    return stream.accepted;
  }

  /** Sort what is kept. A page that died while it said its first words kept the session's secret and not the stream's. */
  async #kept(lookBackMs = 1000 * this.#settings.lookBackS) {
    const { streams, secrets, commands } = await this.#storage.load();
    const whole = new Set(secrets.map(({ key }) => key));
    for (const { key, session, url } of streams) {
      if (whole.has(key) || url !== this.#url) continue;
      const { secret } = await this.#secrets.known(session);
      if (secret) secrets.push({ key, secret });
    }
    return sortInterrupted({ streams, secrets, commands }, this.#means.wall(), lookBackMs);
  }

  /** Forget what nobody needs any more: a tab that still holds a stream may have waited for a person all that time. */
  async #clear(keys) {
    const releases = await Promise.all(keys.map((key) => lockOf(key, { ifAvailable: true })));
    const free = keys.filter((_, index) => releases[index] !== null);
    if (free.length > 0) await this.#storage.apply(free.map((key) => ({ op: "forget", key })));
    for (const release of releases) release?.();
  }

  /** Let the streams of a session that live here connect with these from now on. */
  #show(session, shown) {
    for (const stream of this.#live.keys()) if (rootOf(stream.session) === rootOf(session)) stream.unlock(shown);
  }

  /** Ask, and throw what the server refuses. */
  async #told(session, path, wish, shown = null) {
    const opening = shown ?? (await this.#secrets.known(session));
    const answer = await this.#ask(session, path, wish, opening).catch((error) => {
      throw lostLine(`the server did not answer (${error.name})`);
    });
    if (!answer.ok) throw await refusalOf(answer);
    return answer;
  }

  async #ask(session, path, { headers, ...wish }, shown) {
    const address = `${this.#url}/v1/sessions/${encodeURIComponent(session)}${path}`;
    const named = { ...(await this.#headers()), ...headersOf(shown), ...headers };
    return fetch(address, { cache: "no-store", redirect: "manual", ...wish, headers: named });
  }

  #now() {
    return this.#means.clock.now();
  }

  #stream(begun) {
    if (typeof begun.session !== "string") throw new MidstreamError("usage", `a session's id is a string, not ${typeof begun.session}`);
    refuseBrokenText(begun.session);
    const { patienceS, reachWithinS, stallAfterS } = this.#settings;
    const reachWithinMs = this.#isReached ? Infinity : 1000 * reachWithinS;
    return new Stream(begun, this.#now(), { patienceMs: 1000 * patienceS, stallAfterMs: 1000 * stallAfterS, reachWithinMs });
  }

  #run(stream, opener, { release = () => {}, means = this.#means } = {}) {
    const live = new LiveStream(stream, means, opener);
    this.#live.set(live, release);
    return live;
  }
}

/**
 * Make a client of the server at `url` (default: where the page came from); see `ConnectOptions` in midstream.d.ts.
 * `storage`, `clock`, `wall` and `chance` are for tests.
 */
export async function connect({ url = "", transport = "auto", ...other } = {}) {
  if (transport !== "auto" && !TRANSPORTS.includes(transport))
    throw new MidstreamError("usage", `a transport is auto or one of ${TRANSPORTS.join(", ")}`);
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
  if (other.oninterrupted) await takeUp(client, other.oninterrupted);
  if (typeof document !== "undefined") whileAlive(client);
  return client;
}

/** Return the address of a server without a slash at its end; a path is one of the page's own server. */
function addressOf(url) {
  const here = globalThis.location?.origin;
  try {
    const { protocol, host, pathname } = new URL(url, here === "null" ? undefined : here);
    const scheme = { "http:": "http", "https:": "https", "ws:": "http", "wss:": "https" }[protocol];
    if (scheme && host) return `${scheme}://${host}${pathname.replace(/\/+$/, "")}`;
  } catch {
    // told below
  }
  throw new MidstreamError("usage", `a server's address looks like 'https://host', or '/path', not '${url}'`);
}

/** Give `oninterrupted` each stream that an earlier page left, all at the same time; what it throws is the page's. */
async function takeUp(client, oninterrupted) {
  try {
    // From their own beginning: this page has shown nothing of them.
    for (const stream of await client.resumeInterrupted({ after: null })) (async () => oninterrupted(stream))();
  } catch (error) {
    if (error.retry !== "later") throw error;
    takeUp(client, oninterrupted); // as soon as it can be read; nobody waits for that
  }
}

/**
 * Hold a stream in this tab; the browser frees it when the tab dies. Returns how to free it, or null where another
 * tab holds it. Without Web Locks nothing is held: the server fences the older connection.
 */
function lockOf(key, options = { signal: AbortSignal.timeout(LOCK_WITHIN_MS) }) {
  const locks = globalThis.navigator?.locks;
  if (!locks) return Promise.resolve(() => {});
  return new Promise((resolve) => {
    const held = (lock) => (lock === null ? resolve(null) : new Promise((release) => resolve(release)));
    locks.request(`midstream ${key}`, options, held).catch(() => resolve(null));
  });
}
