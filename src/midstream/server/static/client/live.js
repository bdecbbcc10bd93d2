/** One stream of a page at work: its half of the protocol, a connection, a timer, and what is written down. */

import { AnswerText, completed, failureOf } from "./answer.js";
import { letGo } from "./lines.js";
import { MidstreamError } from "./stream.js";

/** Events waiting for a slow consumer; above it the connection is closed and the rest is asked for later. */
const UNREAD_EVENTS_MAX = 8192;
/** A timer that is later than this shows that the page did not run: asleep, frozen, or in the background. */
const LATE_MS = 2000;

/**
 * One stream over as many connections as it takes: an async iterable of events that ends with the turn (or never,
 * when it only follows) and throws `MidstreamError` where the server refused for good, `TurnFailedError` after the last
 * event of a turn that did not complete.
 */
export class LiveStream {
  #stream;
  #means;
  #opener;
  #line = null;
  #timer = null;
  #unread = [];
  #answerText = new AnswerText();
  #isRead = false;
  #last = null; // the newest event that the loop was given
  #isOverfull = false;
  #isResting = false;
  #isLocked = true;
  #isDialing = false;
  #unlocking;
  #reader = null;
  #work = Promise.resolve();
  #settling = 0;
  #savedCursor;
  #consumed;
  #accepted = {};
  #ended = {};

  /** @param opener Promises what opens the session, see `SessionSecrets`: no connection is made before. */
  constructor(stream, means, opener) {
    this.#stream = stream;
    this.#means = means;
    this.#opener = opener;
    this.#consumed = this.#savedCursor = stream.cursor;
    this.accepted = promised(this.#accepted);
    this.ended = promised(this.#ended);
    this.#settle();
    this.#unlocking = this.#begin();
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

  /** Whether its message waits for the turns before it. */
  get isQueued() {
    return this.#stream.isQueued;
  }

  /** The last event the loop over this stream has finished with. */
  get cursor() {
    return this.#consumed;
  }

  get pendingText() {
    return this.#stream.pendingText;
  }

  /** What is wrong with what was kept of it, or "". */
  get damage() {
    return this.#stream.damage;
  }

  get isDegraded() {
    return this.#stream.isDegraded;
  }

  get isAcknowledged() {
    return this.#stream.isAcknowledged;
  }

  /** Events that came and that the loop has not asked for, the oldest first. Looking at them handles none. */
  get unread() {
    return [...this.#unread];
  }

  /** Resolves when all that is due now is written down, sent and delivered. */
  get settled() {
    return this.#unlocking.then(() => this.#work);
  }

  /** How the connection is; see `Connection` in midstream.d.ts. */
  get connection() {
    const { deadlineAt, waitingOn, isReconnecting, isStalled, trouble } = this.#stream;
    const isBeginning = this.#isLocked && this.#stream.phase === "waiting";
    const phase = isBeginning ? "connecting" : this.#stream.phase;
    const isTimed = phase === "waiting" && !this.#isResting;
    return {
      session: this.session,
      phase: phase === "opening" ? "connecting" : phase,
      retryAt: isTimed ? this.#means.wall() + Math.max(0, deadlineAt - this.#now()) : null,
      waitingOn,
      isReconnecting,
      isStalled,
      trouble,
    };
  }

  /** Whether somebody may still hear of it: it has neither ended nor been detached. */
  get isHeard() {
    return this.#stream.phase !== "ended" && !this.#stream.isDetached;
  }

  /** Stop the turn. Like every command it is sent until it is acknowledged; resolves when the turn has ended. */
  async abort() {
    this.#stream.abort(this.#stream.turn, this.#now());
    this.#settle();
    await this.ended;
  }

  /** Show these secrets from the next connection on. */
  unlock(shown) {
    this.#stream.unlock(shown, this.#now());
  }

  /** Hear no more of it. What was sent still arrives; the turn goes on without this reader. */
  detach() {
    this.#unread = [];
    this.#stream.detach(this.#now());
    this.#settle();
  }

  /** Close the connection as a lost network would; `forMs` keeps it away for that long. */
  cut(forMs = 0) {
    this.#lost({ notBefore: this.#now() + forMs });
  }

  /** Try at once, or prove the connection: the network or the reader came back. */
  wake() {
    if (this.#isHeld) return;
    this.#stream.wake(this.#now());
    this.#settle();
  }

  /** Have no connection and no timer until `goOn`: the browser puts the page to sleep. */
  rest() {
    if (this.#isResting || this.#stream.phase === "ended") return;
    this.#isResting = true;
    this.#lost();
  }

  /** The page is awake again. */
  goOn() {
    if (!this.#isResting) return;
    this.#isResting = false;
    this.wake();
  }

  /** Give it up: another page has it. What is written down is that page's business. */
  yieldTo(error) {
    this.#fail(error);
    this.#settle();
  }

  /** Let go of everything here and keep what is written down. */
  leave() {
    this.#stream.leave();
    this.#means.release(this);
    this.#settle();
  }

  /** Read what is left to the end of the turn and return its whole answer; throw where the turn did not complete. */
  async answer() {
    if (!this.#isRead) for await (const _ of this);
    return completed(this.session, this.#last);
  }

  async *[Symbol.asyncIterator]() {
    let isWhole = false;
    try {
      for (;;) {
        while (this.#unread.length > 0) {
          const event = this.#unread.shift();
          this.#last = event;
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
      isWhole = this.#isRead = true;
      const failure = this.#stream.error ?? (this.#stream.isOver ? failureOf(this.session, this.#last) : null);
      if (failure) throw failure;
    } finally {
      if (!isWhole) this.detach();
      else await this.#finished();
    }
  }

  async #begin() {
    while (this.#isLocked && this.#stream.phase !== "ended") {
      try {
        this.unlock(await this.#opener.first());
        this.#isLocked = false;
      } catch (error) {
        if (error.retry !== "later") this.#fail(error); // else another tab holds it: ask again
      }
    }
    this.#isLocked = false;
    this.#settle();
  }

  #hasMore() {
    return this.#settling > 0 || this.#unread.length > 0;
  }

  /** The loop has handled everything; where that was the turn's end, nothing is kept any more. */
  async #finished() {
    this.#stream.finished();
    this.#settle();
    await this.#work;
  }

  get #isHeld() {
    return this.#isOverfull || this.#isResting || this.#isLocked;
  }

  /** Carry out what the stream says, one settling after the other, so that a write precedes its frame. */
  #settle() {
    this.#keepLine();
    this.#armTimer();
    const { writes, frames, events } = this.#stream.take();
    const line = this.#line;
    const isLast = this.#stream.phase === "ended";
    this.#settling += 1;
    this.#work = this.#work.then(async () => {
      try {
        if (writes.length > 0) await this.#means.storage.apply(this.#addressed(writes));
        // A line that was dropped meanwhile swallows them: the next welcome plays back what is owed.
        for (const frame of frames) line?.send(frame);
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
    for (const event of this.#stream.isDetached ? [] : events)
      this.#unread.push({ ...event, ...this.#answerText.take(event) });
    if (this.#unread.length > UNREAD_EVENTS_MAX && this.#line && !this.#isOverfull) {
      this.#isOverfull = true;
      this.#lost();
    }
    if (this.#stream.acked > 0) this.#accepted.resolve();
    this.#reader?.();
  }

  #keepLine() {
    if (this.#isHeld) return;
    if (this.#stream.phase === "waiting") this.#stream.tick(this.#now());
    if (this.#stream.wantsSocket && this.#line === null && !this.#isDialing) this.#unlocking = this.#dial();
  }

  /** Make a connection, with what opens the session now: another tab may have changed that. */
  async #dial() {
    this.#isDialing = true;
    const shown = await this.#opener.again().catch(() => null); // what was shown before may still do
    this.#isDialing = false;
    if (shown !== null && this.#stream.wantsSocket) this.unlock(shown);
    if (this.#stream.wantsSocket && !this.#isHeld) this.#makeLine();
    this.#settle();
  }

  #makeLine() {
    const line = this.#means.dial(this.session, this.key);
    this.#line = line;
    const ifCurrent = (act) => (event) => {
      if (this.#line === line) act(event);
    };
    line.onopen = ifCurrent(() => {
      this.#stream.opened(this.#now());
      this.#settle();
    });
    line.onmessage = ifCurrent(({ data }) => {
      if (this.#stream.receive(data, this.#now())) this.#lost();
      else this.#settle();
      const { isEncrypted, secret } = this.#stream;
      if (isEncrypted !== null) this.#opener.learned(isEncrypted, secret);
    });
    line.onheard = ifCurrent(() => {
      this.#stream.heard(this.#now());
      this.#armTimer();
    });
    line.onclose = ifCurrent((event) => this.#lost({ error: event?.error ?? null }));
  }

  /** There is no connection any more, whoever ended it. */
  #lost(why = {}) {
    this.#dropLine();
    this.#stream.lost(this.#means.chance(), this.#now(), why);
    this.#settle();
  }

  #dropLine() {
    letGo(this.#line);
    this.#line = null;
  }

  #armTimer() {
    const { clock } = this.#means;
    clock.clear(this.#timer);
    const { dueAt } = this.#stream;
    if (this.#isHeld || dueAt === Infinity) return;
    this.#timer = clock.set(
      () => {
        const now = this.#now();
        if (this.#stream.tick(now, now - dueAt > LATE_MS)) this.#lost();
        else this.#settle();
      },
      Math.max(0, dueAt - this.#now()),
    );
  }

  #saveCursor() {
    if (!this.#stream.isKept || this.#savedCursor === "saving") return;
    // One write at a time; the newest cursor wins.
    this.#savedCursor = "saving";
    this.#work = this.#work.then(async () => {
      const saved = this.#consumed;
      if (this.#stream.isKept) {
        const write = { op: "stream", value: this.#stream.record() };
        await this.#means.storage.apply(this.#addressed([write])).catch(() => {});
      }
      this.#savedCursor = saved;
      if (saved !== this.#consumed) this.#saveCursor();
    });
  }

  /** What is kept names its server and the time, and the cursor is the reader's, not the wire's. */
  #addressed(writes) {
    const { url } = this.#means;
    const more = { cursor: this.#consumed, url, touchedAt: this.#means.wall() };
    return writes.map((write) =>
      write.op === "stream" ? { ...write, value: { ...write.value, ...more } } : write,
    );
  }

  #fail(error) {
    const told = error instanceof MidstreamError ? error : new MidstreamError("storage", String(error));
    this.#stream.error ??= told;
    this.#stream.leave();
    this.#finish();
  }

  #finish() {
    this.#means.clock.clear(this.#timer);
    this.#dropLine();
    const error = this.#stream.error;
    if (this.#stream.acked > 0) this.#accepted.resolve();
    else this.#accepted.reject(error ?? new MidstreamError("usage", "this page let go of the stream"));
    this.#ended.resolve(error);
    this.#means.release(this);
  }

  #now() {
    return this.#means.clock.now();
  }
}

function promised(doors) {
  const promise = new Promise((resolve, reject) => Object.assign(doors, { resolve, reject }));
  promise.catch(() => {}); // whoever cares awaits it; nobody must
  return promise;
}
