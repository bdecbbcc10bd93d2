/** The I/O of one stream: its connection, its timer and its storage. */

import { AnswerText, completedText, failureOf } from "./answer.js";
import { closeQuietly, errorOfClose } from "./connections.js";
import { MidstreamError } from "./errors.js";

/** Limit for the events that wait for a slow consumer. Above it the connection is closed until the consumer has read them. */
const UNREAD_EVENTS_MAX = 8192;
/** A timer that is later than this shows that the page did not run: asleep, frozen, or in the background. */
const LATE_MS = 2000;

/**
 * One stream, over as many connections as necessary: an async iterable of events. It ends with the turn; the stream of a
 * reader never ends. It throws `MidstreamError` after a final refusal of the server, and `TurnFailedError` after the last
 * event of a turn that did not complete.
 */
export class LiveStream {
  #stream;
  #environment;
  #access;
  #connection = null;
  #timer = null;
  #unread = [];
  #answerText = new AnswerText();
  #isRead = false;
  #last = null; // the newest event that the loop received
  #isOverfull = false;
  #isDisconnected = false;
  #needsSecrets = true;
  #isDialing = false;
  #preparing;
  #reader = null;
  #work = Promise.resolve();
  #settling = 0;
  #savedCursor;
  #handled;
  #accepted = {};
  #ended = {};

  /** @param access The access to the session, see `SessionSecrets`. No connection is made before it returns the secrets. */
  constructor(stream, environment, access) {
    this.#stream = stream;
    this.#environment = environment;
    this.#access = access;
    this.#handled = this.#savedCursor = stream.cursor;
    this.accepted = createPromise(this.#accepted);
    this.ended = createPromise(this.#ended);
    this.#settle();
    this.#preparing = this.#begin();
  }

  get session() { return this.#stream.session; }
  get key() { return this.#stream.key; }
  get turn() { return this.#stream.turn; }
  get isQueued() { return this.#stream.isQueued; } // its message waits for the turns before it
  get pendingText() { return this.#stream.pendingText; }
  get damage() { return this.#stream.damage; } // of the stored stream, or ""
  get isDegraded() { return this.#stream.isDegraded; }
  get isAcknowledged() { return this.#stream.isAcknowledged; }
  get cursor() { return this.#handled; } // the last event that the loop over this stream has handled

  /** Received events that the loop has not requested, the oldest first. Reading this property handles none of them. */
  get unread() {
    return [...this.#unread];
  }

  /** Resolves when everything that is due now is stored, sent and delivered. */
  get settled() {
    return this.#preparing.then(() => this.#work);
  }

  /** The state of the connection; see `Connection` in midstream.d.ts. */
  get connection() {
    const { deadlineAt, waitingOn, isReconnecting, isStalled, trouble } = this.#stream;
    const isBeginning = this.#needsSecrets && this.#stream.phase === "waiting";
    const phase = isBeginning ? "connecting" : this.#stream.phase;
    const isTimed = phase === "waiting" && !this.#isDisconnected;
    return {
      session: this.session,
      phase: phase === "opening" ? "connecting" : phase,
      retryAt: isTimed ? this.#environment.wall() + Math.max(0, deadlineAt - this.#now()) : null,
      waitingOn,
      isReconnecting,
      isStalled,
      trouble,
    };
  }

  /** Whether the stream still delivers events: it has neither ended nor been abandoned. */
  get isActive() {
    return this.#stream.phase !== "ended" && !this.#stream.isAbandoned;
  }

  /** Cancel the turn. Like every command this is sent until it is acknowledged. Resolves when the turn has ended. */
  async abort() {
    this.#stream.abort(this.#stream.turn, this.#now());
    this.#settle();
    await this.ended;
  }

  /** Send these secrets from the next connection on. */
  showSecrets(secrets) {
    this.#stream.showSecrets(secrets, this.#now());
  }

  /** Deliver no more events, and store nothing once all commands are acknowledged. The turn continues. */
  abandon() {
    this.#unread = [];
    this.#stream.abandon(this.#now());
    this.#settle();
  }

  /** Close the connection, like a lost network. None is made again for `forMs`. */
  cut(forMs = 0) {
    this.#endConnection({ notBefore: this.#now() + forMs });
  }

  /** Connect at once, or test the open connection: the network may be back, or the page is visible. */
  wake() {
    if (this.#isPaused) return;
    this.#stream.wake(this.#now());
    this.#settle();
  }

  /** Close the connection and stop the timer until `reconnect`, as the browser freezes the page. */
  disconnect() {
    if (this.#isDisconnected || this.#stream.phase === "ended") return;
    this.#isDisconnected = true;
    this.#endConnection();
  }

  /** Connect again after `disconnect`. */
  reconnect() {
    if (!this.#isDisconnected) return;
    this.#isDisconnected = false;
    this.wake();
  }

  /** End with an error, as another page has resumed the stream. Its stored state belongs to that page. */
  endWith(error) {
    this.#fail(error);
    this.#settle();
  }

  /** Close everything in this page, and keep the stored state. */
  detach() {
    this.#stream.detach();
    this.#environment.release(this);
    this.#settle();
  }

  /** Read to the end of the turn and return the whole answer; throw if the turn did not complete. */
  async answer() {
    if (!this.#isRead) for await (const _ of this);
    return completedText(this.session, this.#last);
  }

  async *[Symbol.asyncIterator]() {
    let isWhole = false;
    try {
      for (;;) {
        while (this.#unread.length > 0) {
          const event = this.#unread.shift();
          this.#last = event;
          yield event;
          this.#handled = event.id;
          this.#saveCursor();
        }
        if (this.#stream.phase === "ended" && !this.#hasMore()) break;
        if (this.#isOverfull) {
          this.#isOverfull = false;
          this.#settle();
        }
        await new Promise((resolve) => (this.#reader = resolve));
      }
      isWhole = this.#isRead = true;
      const failure = this.#stream.error ?? (this.#stream.isOver ? failureOf(this.session, this.#last) : null);
      if (failure) throw failure;
    } finally {
      if (!isWhole) this.abandon();
      else await this.#markHandled();
    }
  }

  async #begin() {
    while (this.#needsSecrets && this.#stream.phase !== "ended") {
      try {
        this.showSecrets(await this.#access.readFirst());
        this.#needsSecrets = false;
      } catch (error) {
        if (error.retry !== "later") this.#fail(error); // else another tab blocks the storage: try again
      }
    }
    this.#needsSecrets = false;
    this.#settle();
  }

  #hasMore() {
    return this.#settling > 0 || this.#unread.length > 0;
  }

  /** Report that the loop has handled every event. If the turn has ended, the stored stream is deleted. */
  async #markHandled() {
    this.#stream.markHandled();
    this.#settle();
    await this.#work;
  }

  get #isPaused() {
    return this.#isOverfull || this.#isDisconnected || this.#needsSecrets;
  }

  /** Do what is due, one call after the other: store first, then send the frames, then deliver the events. */
  #settle() {
    this.#ensureConnection();
    this.#armTimer();
    const { writes, frames, events } = this.#stream.take();
    const connection = this.#connection;
    const isLast = this.#stream.phase === "ended";
    this.#settling += 1;
    this.#work = this.#work.then(async () => {
      try {
        if (writes.length > 0) await this.#environment.storage.apply(this.#withServer(writes));
        // Frames on a connection that was closed meanwhile are lost. The next connection plays back the commands.
        for (const frame of frames) connection?.send(frame);
        if (isLast) this.#finish();
      } catch (error) {
        this.#fail(error);
      }
      this.#settling -= 1;
      this.#deliver(events);
    });
    this.#environment.notify(this);
  }

  #deliver(events) {
    try {
      for (const event of this.#stream.isAbandoned ? [] : events)
        this.#unread.push({ ...event, ...this.#answerText.take(event) });
    } catch (error) {
      this.#fail(new MidstreamError("record_undecodable", `an event cannot be read: ${error.message}`));
    }
    if (this.#unread.length > UNREAD_EVENTS_MAX && this.#connection && !this.#isOverfull) {
      this.#isOverfull = true;
      this.#endConnection();
    }
    if (this.#stream.acked > 0) this.#accepted.resolve();
    this.#reader?.();
  }

  #ensureConnection() {
    if (this.#isPaused) return;
    if (this.#stream.phase === "waiting") this.#stream.tick(this.#now());
    if (this.#stream.isConnectionWanted && this.#connection === null && !this.#isDialing) this.#preparing = this.#dial();
  }

  /** Make a connection with the current secrets of the session, which another tab may have changed. */
  async #dial() {
    this.#isDialing = true;
    const secrets = await this.#access.read().catch(() => null); // the earlier secrets may still be valid
    this.#isDialing = false;
    if (secrets !== null && this.#stream.isConnectionWanted) this.showSecrets(secrets);
    if (this.#stream.isConnectionWanted && !this.#isPaused) this.#openConnection();
    this.#settle();
  }

  #openConnection() {
    const connection = this.#environment.dial(this.session, this.key);
    this.#connection = connection;
    const ifCurrent = (act) => (event) => {
      if (this.#connection === connection) act(event);
    };
    connection.onopen = ifCurrent(() => {
      this.#stream.beginConnection(this.#now());
      this.#settle();
    });
    connection.onmessage = ifCurrent(({ data }) => {
      if (this.#stream.receive(data, this.#now())) this.#endConnection();
      else this.#settle();
      const { isEncrypted, secret } = this.#stream;
      if (isEncrypted !== null) this.#access.noteEncryption(isEncrypted, secret);
    });
    connection.onbytes = ifCurrent(() => {
      this.#stream.noteTraffic(this.#now());
      this.#armTimer();
    });
    connection.onclose = ifCurrent((event) => this.#endConnection({ error: errorOfClose(event) }));
  }

  /** Close the connection, and plan the next one. */
  #endConnection(why = {}) {
    this.#closeConnection();
    this.#stream.endConnection(this.#environment.chance(), this.#now(), why);
    this.#settle();
  }

  #closeConnection() {
    closeQuietly(this.#connection);
    this.#connection = null;
  }

  #armTimer() {
    const { clock } = this.#environment;
    clock.clear(this.#timer);
    const { dueAt } = this.#stream;
    if (this.#isPaused || dueAt === Infinity) return;
    this.#timer = clock.set(
      () => {
        const now = this.#now();
        if (this.#stream.tick(now, now - dueAt > LATE_MS)) this.#endConnection();
        else this.#settle();
      },
      Math.max(0, dueAt - this.#now()),
    );
  }

  #saveCursor() {
    if (!this.#stream.isStored || this.#savedCursor === "saving") return;
    // One write at a time. Each stores the newest cursor.
    this.#savedCursor = "saving";
    this.#work = this.#work.then(async () => {
      const saved = this.#handled;
      if (this.#stream.isStored) {
        const write = { op: "stream", value: this.#stream.record() };
        await this.#environment.storage.apply(this.#withServer([write])).catch(() => {});
      }
      this.#savedCursor = saved;
      if (saved !== this.#handled) this.#saveCursor();
    });
  }

  /** Add the server, the time and the cursor of the loop to each stored stream. */
  #withServer(writes) {
    const { url } = this.#environment;
    const more = { cursor: this.#handled, url, touchedAt: this.#environment.wall() };
    return writes.map((write) =>
      write.op === "stream" ? { ...write, value: { ...write.value, ...more } } : write,
    );
  }

  #fail(error) {
    this.#stream.error ??= error instanceof MidstreamError ? error : new MidstreamError("storage", String(error));
    this.#stream.detach();
    this.#finish();
  }

  #finish() {
    this.#environment.clock.clear(this.#timer);
    this.#closeConnection();
    const error = this.#stream.error;
    if (this.#stream.acked > 0) this.#accepted.resolve();
    else this.#accepted.reject(error ?? new MidstreamError("usage", "this page detached the stream before its first command was acknowledged"));
    this.#ended.resolve(error);
    this.#environment.release(this);
  }

  #now() {
    return this.#environment.clock.now();
  }
}

function createPromise(callbacks) {
  const promise = new Promise((resolve, reject) => Object.assign(callbacks, { resolve, reject }));
  promise.catch(() => {}); // a rejection that no caller awaits is not reported
  return promise;
}
