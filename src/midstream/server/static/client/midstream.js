/**
 * midstream for browsers: send a message, read the answer, survive the network.
 *
 *     const client = await connect({ url: location.origin });
 *     const stream = client.send("my-session", "Hello");
 *     for await (const event of stream) console.log(event.id, event.record);
 *
 * Theory of operation. `Stream` (stream.js) is the client's half of the protocol and does nothing by itself: it
 * is told of sockets, frames and time, and says what to write down, send and deliver. `LiveStream` here owns one
 * `Stream`, one socket at a time and one timer, and obeys. `IndexedStorage` (storage.js) keeps what must survive
 * a reload.
 *
 * No dependency and no build step: to use it elsewhere, copy this folder.
 */

import { SharedSocket, canShare } from "./shared.js";
import { IndexedStorage, MemoryStorage, sortInterrupted } from "./storage.js";
import { MidstreamError, Stream } from "./stream.js";

export { LOOK_BACK_MS } from "./storage.js";
export { MidstreamError, PROTOCOL_VERSION, parseEventId } from "./stream.js";

/** Events waiting for a slow consumer; above it the socket is closed and the rest is asked for later. */
const UNREAD_EVENTS_MAX = 8192;
/** A page that was left gives its streams up a moment after the next one begins; another tab keeps them. */
const LOCK_WITHIN_MS = 500;

/**
 * One stream over as many sockets as it takes: an async iterable of events that ends with the turn (or never,
 * when it only follows) and throws `MidstreamError` where the server refused for good.
 */
export class LiveStream {
  #stream;
  #means;
  #socket = null;
  #timer = null;
  #unread = [];
  #isOverfull = false;
  #reader = null;
  #work = Promise.resolve();
  #settling = 0;
  #savedCursor;
  #consumed;
  #accepted = {};
  #ended = {};

  constructor(stream, means) {
    this.#stream = stream;
    this.#means = means;
    this.#consumed = this.#savedCursor = stream.cursor;
    this.accepted = promised(this.#accepted);
    this.ended = promised(this.#ended);
    this.#settle();
  }

  get session() {
    return this.#stream.session;
  }

  get key() {
    return this.#stream.key;
  }

  get turn() {
    return this.#stream.turn;
  }

  /** The last event the loop over this stream has finished with. */
  get cursor() {
    return this.#consumed;
  }

  get pendingText() {
    return this.#stream.pendingText;
  }

  get isDegraded() {
    return this.#stream.isDegraded;
  }

  /** How the connection is: "live", "connecting", "waiting" (until `retryAt`, in ms since 1970) or "ended". */
  get connection() {
    const { phase, deadlineAt, waitingOn } = this.#stream;
    return {
      session: this.session,
      phase: phase === "opening" ? "connecting" : phase,
      retryAt: phase === "waiting" ? deadlineAt : null,
      waitingOn,
    };
  }

  /** Whether somebody may still hear of it: it has neither ended nor been detached. */
  get isHeard() {
    return this.#stream.phase !== "ended" && !this.#stream.isDetached;
  }

  /** Stop the turn. Like every chunk it is sent until it is acknowledged; resolves when the turn has ended. */
  async abort() {
    this.#stream.abort(this.#stream.turn, this.#now());
    this.#settle();
    await this.ended;
  }

  /** Hear no more of it. What was sent still arrives; the turn goes on without this reader. */
  detach() {
    this.#unread = [];
    this.#stream.detach(this.#now());
    this.#settle();
  }

  /** Close the connection as a lost network would; `forMs` keeps it away for that long. */
  cut(forMs = 0) {
    const now = this.#now();
    this.#dropSocket();
    this.#stream.lost(this.#means.chance(), now, now + forMs);
    this.#settle();
  }

  /** Try at once, or prove the connection: the network or the reader came back. */
  wake() {
    this.#stream.wake(this.#now());
    this.#settle();
  }

  /** Let go of everything here and keep what is written down. */
  leave() {
    this.#stream.leave();
    this.#means.release(this);
    this.#settle();
  }

  async *[Symbol.asyncIterator]() {
    try {
      for (;;) {
        while (this.#unread.length > 0) {
          const event = this.#unread.shift();
          yield event;
          this.#consumed = event.id;
          this.#saveCursor();
        }
        if (this.#stream.phase === "ended" && !this.#hasMore()) break;
        if (this.#isOverfull) {
          this.#isOverfull = false;
          this.#settle();
        }
        await new Promise((resolve) => (this.#reader = resolve));
      }
      if (this.#stream.error) throw this.#stream.error;
    } finally {
      if (this.#stream.phase !== "ended") this.detach();
    }
  }

  #hasMore() {
    return this.#settling > 0 || this.#unread.length > 0;
  }

  /** Carry out what the stream says, one settling after the other, so that a write precedes its frame. */
  #settle() {
    this.#keepSocket();
    this.#armTimer();
    const { writes, frames, events } = this.#stream.take();
    const socket = this.#socket;
    const isLast = this.#stream.phase === "ended";
    this.#settling += 1;
    this.#work = this.#work.then(async () => {
      try {
        if (writes.length > 0) await this.#means.storage.apply(this.#addressed(writes));
        // A socket that was dropped meanwhile swallows them: the next welcome plays back what is owed.
        for (const frame of frames) socket?.send(frame);
        if (isLast) this.#finish();
      } catch (error) {
        this.#fail(error);
      }
      this.#settling -= 1;
      this.#deliver(events);
    });
    this.#means.notify(this);
  }

  #deliver(events) {
    if (!this.#stream.isDetached) this.#unread.push(...events);
    if (this.#unread.length > UNREAD_EVENTS_MAX && this.#socket && !this.#isOverfull) {
      this.#isOverfull = true;
      this.#stream.lost(0, this.#now());
      this.#dropSocket();
      this.#keepSocket();
    }
    if (this.#stream.acked > 0) this.#accepted.resolve();
    this.#reader?.();
  }

  #keepSocket() {
    if (this.#isOverfull) return;
    if (this.#stream.phase === "waiting") this.#stream.tick(this.#now());
    if (this.#stream.wantsSocket && this.#socket === null) this.#makeSocket();
  }

  #makeSocket() {
    const socket = this.#means.makeSocket(this.session, this.key);
    this.#socket = socket;
    const ifCurrent = (act) => (event) => {
      if (this.#socket === socket) act(event);
    };
    socket.onopen = ifCurrent(() => {
      this.#stream.opened(this.#now());
      this.#settle();
    });
    socket.onmessage = ifCurrent(({ data }) => {
      if (this.#stream.receive(data, this.#now())) this.#reconnect();
      this.#settle();
    });
    socket.onclose = ifCurrent(() => this.#reconnect());
  }

  #reconnect() {
    this.#dropSocket();
    this.#stream.lost(this.#means.chance(), this.#now());
    this.#settle();
  }

  #dropSocket() {
    const socket = this.#socket;
    if (socket === null) return;
    this.#socket = null;
    socket.onopen = socket.onmessage = socket.onclose = null;
    socket.close();
  }

  #armTimer() {
    clearTimeout(this.#timer);
    if (this.#isOverfull || this.#stream.deadlineAt === Infinity) return;
    const wait = Math.max(0, this.#stream.deadlineAt - this.#now());
    this.#timer = setTimeout(() => {
      if (this.#stream.tick(this.#now())) this.#reconnect();
      else this.#settle();
    }, wait);
  }

  #saveCursor() {
    if (!this.key || this.isDegraded || this.#stream.phase === "ended") return;
    if (this.#savedCursor === "saving") return;
    // One write at a time; the newest cursor wins.
    this.#savedCursor = "saving";
    this.#work = this.#work.then(async () => {
      const saved = this.#consumed;
      if (this.#stream.phase !== "ended") {
        const value = { ...this.#stream.record(this.#now()), cursor: saved };
        await this.#means.storage.apply(this.#addressed([{ op: "stream", value }])).catch(() => {});
      }
      this.#savedCursor = saved;
      if (saved !== this.#consumed) this.#saveCursor();
    });
  }

  /** What is kept names its server, and the cursor is the reader's, not the wire's. */
  #addressed(writes) {
    const url = this.#means.url;
    return writes.map((write) =>
      write.op === "stream" ? { ...write, value: { ...write.value, cursor: this.#consumed, url } } : write,
    );
  }

  #fail(error) {
    const told = error instanceof MidstreamError ? error : new MidstreamError("storage", String(error));
    this.#stream.error ??= told;
    this.#stream.leave();
    this.#finish();
  }

  #finish() {
    clearTimeout(this.#timer);
    this.#dropSocket();
    const error = this.#stream.error;
    if (this.#stream.acked > 0) this.#accepted.resolve();
    else this.#accepted.reject(error ?? new MidstreamError("usage", "this page let go of the stream"));
    this.#ended.resolve(error);
    this.#means.release(this);
  }

  #now() {
    return this.#means.now();
  }
}

function promised(doors) {
  const promise = new Promise((resolve, reject) => Object.assign(doors, { resolve, reject }));
  promise.catch(() => {}); // whoever cares awaits it; nobody must
  return promise;
}

/** A connection to one server: its streams, and what is kept of them. */
export class Client {
  #url;
  #storage;
  #onstate;
  #live = new Map(); // LiveStream -> release of its lock
  #means;

  constructor({ url, storage, onstate, isShared, makeSocket, now, chance }) {
    this.#url = url;
    this.#storage = storage;
    this.#onstate = onstate;
    this.#means = {
      url,
      storage,
      now,
      chance,
      makeSocket: (session, key) => {
        const address = streamUrl(url, session);
        return key || !isShared ? makeSocket(address) : new SharedSocket(address, makeSocket);
      },
      notify: (stream) => this.#onstate(stream.connection, stream),
      release: (stream) => {
        this.#live.get(stream)?.();
        this.#live.delete(stream);
      },
    };
  }

  /** Whether an unsent message survives a reload: false where the browser refuses IndexedDB. */
  get isDurable() {
    return this.#storage.isDurable;
  }

  /**
   * Say something in a session; the stream gives every event from here to the turn's end.
   *
   * `after` is the last event the caller has of this session; without it events begin with this stream. While a turn
   * runs, the message waits for its end, or is refused where `whenBusy` is "refuse".
   */
  send(session, text, { after = null, whenBusy = "queue" } = {}) {
    return this.#start(session, after, (stream, now) => stream.say(text, now, whenBusy));
  }

  /** Go on with the last turn, which was interrupted or failed; the stream gives the rest of it. */
  resume(session, { turn = 0, after = null } = {}) {
    return this.#start(session, after, (stream, now) => stream.resume(turn, now));
  }

  /**
   * Answer an open question: `question` is a `question_asked` record. For one of a sub-agent, `session` is the
   * `child` of the `child_said` that told of it. Resolves when the answer is in the journal.
   */
  async answer(session, question, choice, { text = "", argumentsJson = null } = {}) {
    const { turn, reply, call_id, digest } = question;
    const answer = { turn, reply, call_id, digest, choice };
    if (text) answer.text = text;
    if (argumentsJson !== null) answer.arguments = argumentsJson;
    return this.#tell(session, (stream, now) => stream.answer(answer, now));
  }

  /** Take back the queued message `number`, or all that wait. Resolves when that is in the journal. */
  async withdraw(session, number = 0) {
    return this.#tell(session, (stream, now) => stream.withdraw(number, now));
  }

  /** Follow a session without saying anything: events after `after`, or from now on. */
  follow(session, after = null) {
    return this.#run(new Stream({ session, cursor: after }, this.#means.now()));
  }

  /**
   * Stop the session's turn, whoever began it: `turn`, or whichever runs. Resolves when the request is in the
   * journal, or the turn over.
   */
  async cancel(session, turn = 0) {
    const isOwn = (live) => live.session === session && live.key && live.isHeard;
    const own = [...this.#live.keys()].find((live) => isOwn(live) && (!turn || live.turn === turn));
    if (own) return own.abort();
    return this.#tell(session, (core, now) => core.abort(turn, now));
  }

  /**
   * Take up the streams that a reload or a crash interrupted, and forget those past the look-back (2 h).
   *
   * `session` takes only that session's; `after` is where its events begin: the stored cursor if absent.
   * Streams that another tab holds are left to it.
   */
  async resumeInterrupted({ session, after } = {}) {
    const held = new Set([...this.#live.keys()].map((live) => live.key));
    const { interrupted, orphans } = sortInterrupted(await this.#storage.load(), this.#means.now());
    const forgotten = orphans.filter((key) => !held.has(key)).map((key) => ({ op: "forget", key }));
    if (forgotten.length > 0) await this.#storage.apply(forgotten);
    const isWanted = (kept) => kept.url === this.#url && (session === undefined || kept.session === session);
    const wanted = interrupted.filter((kept) => isWanted(kept) && !held.has(kept.key));
    const releases = await Promise.all(wanted.map((kept) => lockOf(kept.key)));
    const resumed = [];
    for (const [index, kept] of wanted.entries()) {
      if (releases[index] === null) continue;
      const cursor = after === undefined ? kept.cursor : after;
      resumed.push(this.#run(new Stream({ ...kept, cursor }, this.#means.now()), releases[index]));
    }
    return resumed;
  }

  /**
   * Return the first message kept here for `session` that no server has acknowledged, or null: {key, text, stream},
   * where `stream` is the one of this page that sends it, or null.
   */
  async unsent(session) {
    const { interrupted } = sortInterrupted(await this.#storage.load(), this.#means.now());
    for (const kept of interrupted) {
      if (kept.url !== this.#url || kept.session !== session) continue;
      const text = new Stream(kept).pendingText;
      const stream = [...this.#live.keys()].find((live) => live.key === kept.key) ?? null;
      if (text !== null) return { key: kept.key, text, stream };
    }
    return null;
  }

  /** Cut every connection as a lost network would; `forMs` keeps it away for that long. */
  cut(forMs = 0) {
    for (const stream of [...this.#live.keys()]) stream.cut(forMs);
  }

  /** Try every waiting connection at once. */
  wake() {
    for (const stream of [...this.#live.keys()]) stream.wake();
  }

  /** Let go of every stream; what is written down stays for `resumeInterrupted`. */
  close() {
    for (const stream of [...this.#live.keys()]) stream.leave();
  }

  #start(session, after, first) {
    const secret = randomText(32);
    const stream = new Stream({ session, key: randomText(16), secret, cursor: after }, this.#means.now());
    first(stream, this.#means.now());
    const lock = lockOf(stream.key);
    return this.#run(stream, () => lock.then((release) => release?.()));
  }

  /** Say something on a stream of its own that is over with its ack. */
  #tell(session, first) {
    const stream = this.#start(session, null, first);
    stream.detach();
    return stream.accepted;
  }

  #run(stream, release = () => {}) {
    const live = new LiveStream(stream, this.#means);
    this.#live.set(live, release);
    return live;
  }
}

/**
 * Make a client of the server at `url` (default: where the page came from).
 *
 * `onstate(connection, stream)` hears of every change of a connection. Tabs that follow the same session share one
 * connection, unless `isShared` is false. `storage` is for tests.
 */
export async function connect({ url = globalThis.location?.origin, onstate = () => {}, ...other } = {}) {
  const client = new Client({
    url: String(url).replace(/\/+$/, ""),
    onstate,
    storage: other.storage ?? (await IndexedStorage.open().catch(() => new MemoryStorage())),
    makeSocket: other.makeSocket ?? ((address) => new WebSocket(address)),
    isShared: (other.isShared ?? true) && canShare(),
    now: other.now ?? Date.now,
    chance: other.chance ?? Math.random,
  });
  if (typeof document !== "undefined") {
    globalThis.addEventListener("online", () => client.wake());
    globalThis.addEventListener("pagehide", (event) => event.persisted || client.close());
    document.addEventListener("visibilitychange", () => {
      if (document.visibilityState === "visible") client.wake();
    });
  }
  return client;
}

function streamUrl(url, session) {
  return `${url.replace(/^http/, "ws")}/v1/sessions/${encodeURIComponent(session)}/stream`;
}

/** Return `bytes` random bytes as base64url. */
export function randomText(bytes) {
  const random = crypto.getRandomValues(new Uint8Array(bytes));
  return btoa(String.fromCharCode(...random))
    .replaceAll("+", "-")
    .replaceAll("/", "_")
    .replaceAll("=", "");
}

/**
 * Hold a stream in this tab; the browser frees it when the tab dies. Returns how to free it, or null where another
 * tab holds it. Without Web Locks nothing is held: the server fences the older connection.
 */
function lockOf(key) {
  const locks = globalThis.navigator?.locks;
  if (!locks) return Promise.resolve(() => {});
  return new Promise((resolve) => {
    const held = () => new Promise((release) => resolve(release));
    const signal = AbortSignal.timeout(LOCK_WITHIN_MS);
    locks.request(`midstream ${key}`, { signal }, held).catch(() => resolve(null));
  });
}
