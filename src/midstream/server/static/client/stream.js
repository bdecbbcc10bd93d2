/**
 * The client's half of the stream protocol, without I/O: no socket, no clock, no storage.
 *
 * The order it asks for is always: write down, then send; apply by event id, then deliver. A chunk's frame is
 * built once, kept as that string and played back as that string, so that its bytes are the same whenever they
 * arrive.
 */

export const PROTOCOL_VERSION = 1;
/** Reconnect at once, then after up to 1 s, doubling to 30 s; chance decides how much of it ("full jitter"). */
const BACKOFF_FIRST_MS = 1000;
const BACKOFF_MOST_MS = 30_000;
/** From making a socket to its welcome. */
const WELCOME_WITHIN_MS = 10_000;
/** From a ping to anything at all. */
const PING_WITHIN_MS = 5000;
/** This many heartbeats without a byte, and the connection is taken for dead. */
const HEARTBEATS_MISSED_MAX = 3;
/** Refusals that the same frame will meet again, whatever their `retry` says of other frames. */
const FINAL_CODES = new Set(["session_busy", "seqno_reused", "stream_fenced", "wrong_secret"]);

/** Ends after which the stream may go on: elsewhere, or when its user has logged in again. */
const KEPT_CODES = new Set(["access", "stream_fenced", "unauthorized"]);

/** What a server refused, or what went wrong here. `code` is stable; `retry` is "never", "later", "now" or "ask". */
export class MidstreamError extends Error {
  constructor(code, message, retry = "never", retryAfterS = null) {
    super(message);
    this.name = "MidstreamError";
    this.code = code;
    this.retry = retry;
    this.retryAfterS = retryAfterS;
  }
}

/** Read "3-17" into its numbers, or throw. */
export function parseEventId(text) {
  const match = /^(\d{1,19})-(\d{1,19})$/.exec(text);
  if (!match) throw new MidstreamError("malformed_frame", `an event id looks like '3-17', not '${text}'`);
  return { epoch: Number(match[1]), position: Number(match[2]) };
}

/** Return the milliseconds to wait after `failures` failures in a row; `chance` is in [0, 1). */
export function backoffMs(failures, chance) {
  if (failures <= 0) return 0;
  const most = Math.min(BACKOFF_MOST_MS, BACKOFF_FIRST_MS * 2 ** Math.min(failures - 1, 16));
  return Math.round(most * (1 - chance));
}

/**
 * The client's half of one stream, without I/O.
 *
 * Times are milliseconds since 1970 and always the last argument. After every call: carry out `take()` in its
 * order (writes, then frames, then events), keep a socket exactly while `wantsSocket`, and call `tick` at
 * `deadlineAt`. Calling anything early or twice is harmless. Nothing the server sends makes a method throw.
 *
 * Phases: "waiting" (until `deadlineAt`, then a socket is wanted), "connecting" (a socket is being made),
 * "opening" (the welcome is owed), "live", "ended" (`error` says why, or is null).
 */
export class Stream {
  #at = null; // where the line of events stands, parsed
  #chunks = []; // not acknowledged: {seqno, frame}, in order
  #writes = [];
  #frames = [];
  #events = [];
  #sent = 0; // chunks below this went out on this connection
  #inFlightMax = 1;
  #silenceMs = WELCOME_WITHIN_MS;
  #failures = 0;
  #notBefore = 0;
  #turnEnd = null; // where the welcome says that this stream's turn is over: the position its words hold for
  #isSnapshotDue = false; // a `gone` said that one follows
  #isGoneDue = false; // the welcome goes on elsewhere than asked: a `gone` follows
  #aheadSince = null; // a heartbeat named an event we do not have

  /**
   * @param kept What `record` gave before, with the `chunks` that were not acknowledged; or a new stream's
   *   `{session, key, secret, cursor}`. Without `key` it only follows the session.
   */
  constructor(kept, now = 0) {
    this.session = kept.session;
    this.key = kept.key ?? "";
    this.secret = kept.secret ?? "";
    this.turn = kept.turn ?? 0;
    this.acked = kept.acked ?? 0;
    this.nextSeqno = kept.nextSeqno ?? 0;
    this.openedAt = kept.openedAt ?? now;
    this.phase = "waiting";
    this.deadlineAt = now;
    this.error = null;
    this.isDegraded = false;
    this.isDetached = kept.isDetached ?? false;
    this.status = "";
    this.waitingOn = "";
    this.frameBytesMax = 1024 * 1024;
    this.#move(kept.cursor ?? null);
    this.#chunks = [...(kept.chunks ?? [])].sort((a, b) => a.seqno - b.seqno);
  }

  /** The last event this stream has, or null where it has not begun. */
  get cursor() {
    return this.#at && `${this.#at.epoch}-${this.#at.position}`;
  }

  get wantsSocket() {
    return this.phase === "connecting" || this.phase === "opening" || this.phase === "live";
  }

  /** Whether every chunk is in the server's journal. */
  get isAcknowledged() {
    return this.#chunks.length === 0;
  }

  /** The message that is not acknowledged yet, or null. */
  get pendingText() {
    for (const { frame } of this.#chunks) {
      const { payload } = JSON.parse(frame);
      if (payload.type === "say") return payload.parts.map((part) => part.text ?? "").join("");
    }
    return null;
  }

  /** What must be known of this stream to take it up again; its chunks are kept apart. */
  record(now) {
    const { session, key, secret, cursor, turn, acked, nextSeqno, openedAt } = this;
    const { isDetached } = this;
    return { session, key, secret, cursor, turn, acked, nextSeqno, isDetached, openedAt, touchedAt: now };
  }

  // --- what the application says ---

  /** Number a user's message. Throws, with nothing changed, if it is larger than a frame may be. */
  say(text, now, whenBusy = "queue") {
    const payload = { type: "say", parts: [{ type: "text", text }] };
    this.#number(whenBusy === "queue" ? payload : { ...payload, when_busy: whenBusy }, now);
  }

  /** Number a person's answer to an open question of a call; see `Answer` in midstream.d.ts. */
  answer(answer, now) {
    this.#number({ type: "answer", ...answer }, now);
  }

  /** Number a request to go on with the last turn, or with `turn` and no other; that becomes this stream's turn. */
  resume(turn, now) {
    this.#number(turn ? { type: "resume", turn } : { type: "resume" }, now);
  }

  /** Number a request to take back a queued message, or all of them. */
  withdraw(number, now) {
    this.#number(number ? { type: "withdraw", number } : { type: "withdraw" }, now);
  }

  /** Number a request to stop `turn`, or whichever turn runs. */
  abort(turn, now) {
    this.#number(turn ? { type: "abort", turn } : { type: "abort" }, now);
  }

  /** Deliver nothing more; the stream lives on until its chunks are acknowledged. */
  detach(now) {
    this.isDetached = true;
    this.#events = [];
    if (this.isAcknowledged) this.#end(null, now);
    else this.#write({ op: "stream", value: this.record(now) });
  }

  /** Leave at once and keep what is written down, so that another page can take it up. */
  leave() {
    this.#rest();
  }

  // --- what the shell tells ---

  /** A socket is open. */
  opened(now) {
    if (this.phase !== "connecting") return;
    this.phase = "opening";
    this.deadlineAt = now + WELCOME_WITHIN_MS;
    const { key: stream, secret, cursor: event_id } = this;
    // STREAM-6: until a first chunk is known to have arrived this is a new stream, which the server need not know.
    const next_seqno = this.acked === 0 ? 0 : this.nextSeqno;
    const open = { type: "open", version: PROTOCOL_VERSION, event_id, snapshots: "gone" };
    this.#frames.push(JSON.stringify(stream ? { ...open, stream, secret, next_seqno } : open));
  }

  /** The socket ended, or never opened. `notBefore` keeps the next one away until then. */
  lost(chance, now, notBefore = 0) {
    if (this.phase === "ended") return;
    this.#frames = [];
    if (this.isDegraded) {
      this.#end(
        new MidstreamError("connection_lost", "the connection broke and this server cannot resume"),
        now,
      );
      return;
    }
    this.phase = "waiting";
    this.#notBefore = Math.max(this.#notBefore, notBefore);
    this.deadlineAt = Math.max(now + backoffMs(this.#failures, chance), this.#notBefore);
    this.#failures += 1;
  }

  /** The network may be back, or somebody is looking: try now, or make sure that the line still lives. */
  wake(now) {
    if (this.phase === "waiting") this.deadlineAt = Math.max(now, this.#notBefore);
    if (this.phase === "live") {
      this.#frames.push('{"type":"ping"}');
      this.deadlineAt = Math.min(this.deadlineAt, now + PING_WITHIN_MS);
    }
  }

  /** Time passed. Returns whether the socket, if any, must be given up (then call `lost`). */
  tick(now) {
    if (now < this.deadlineAt) return false;
    if (this.phase === "waiting") {
      this.phase = "connecting";
      this.deadlineAt = now + WELCOME_WITHIN_MS;
      return false;
    }
    return this.wantsSocket;
  }

  /** Take one message off the wire. Returns whether the socket must be given up (then call `lost`). */
  receive(text, now) {
    if (!this.wantsSocket) return false;
    this.deadlineAt = now + this.#silenceMs;
    try {
      return this.#receive(JSON.parse(text), now) === "reconnect";
    } catch (error) {
      if (error instanceof SyntaxError || error instanceof TypeError || error instanceof MidstreamError)
        return true;
      throw error;
    }
  }

  /** Return what is to be done, in this order: writes (await them), frames, events. */
  take() {
    const taken = { writes: this.#writes, frames: this.#frames, events: this.#events };
    this.#writes = [];
    this.#frames = [];
    this.#events = [];
    return taken;
  }

  // --- inside ---

  #receive(frame, now) {
    switch (frame.type) {
      case "welcome":
        return this.#welcome(frame, now);
      case "ack":
        this.#failures = 0;
        return this.#acknowledge(frame.seqno + 1, now);
      case "events":
        return this.#apply(frame.events, now);
      case "gone":
        this.#move(frame.resume_from);
        this.#isGoneDue = false;
        this.#isSnapshotDue = frame.has_snapshot ?? false;
        if (!this.isDetached) {
          const { resume_from: id, reason, has_snapshot: hasSnapshot = false } = frame;
          this.#events.push({ type: "gone", id, reason, hasSnapshot });
        }
        this.#write({ op: "stream", value: this.record(now) });
        return this.#endIfDone(now);
      case "snapshot":
        return this.#replace(frame, now);
      case "heartbeat":
        return this.#heartbeat(frame);
      case "error":
        return this.#refused(frame, now);
      default:
        return undefined; // a newer server's frame; the version in the welcome says which matter
    }
  }

  #welcome(frame, now) {
    const forgot = frame.acked < this.acked;
    this.phase = "live";
    this.isDegraded = frame.is_degraded ?? false;
    this.status = frame.status ?? "";
    this.frameBytesMax = frame.frame_bytes_max ?? this.frameBytesMax;
    this.#inFlightMax = frame.in_flight_max ?? 64;
    this.#silenceMs = HEARTBEATS_MISSED_MAX * 1000 * (frame.heartbeat_s ?? 10);
    this.deadlineAt = now + this.#silenceMs;
    this.#notBefore = 0;
    this.#aheadSince = null;
    this.turn = frame.turn || this.turn;
    if (this.#at === null) this.#move(frame.resume_from);
    this.#isGoneDue = frame.resume_from !== this.cursor;
    this.#isSnapshotDue = false;
    if (this.isDegraded && this.key) this.#writes.push({ op: "forget", key: this.key });
    if (this.key && forgot) {
      // Acknowledged chunks are gone from here too: they cannot be played back.
      const message = "the server no longer knows this stream";
      return this.#end(new MidstreamError("stream_not_found", message), now);
    }
    this.#turnEnd = frame.turn && frame.status === "idle" ? parseEventId(frame.event_id) : null;
    this.#sent = frame.acked;
    this.nextSeqno = Math.max(this.nextSeqno, frame.acked);
    return this.#acknowledge(frame.acked, now);
  }

  /** Go on behind a snapshot, which stands for all events up to it. */
  #replace(frame, now) {
    this.#move(frame.event_id);
    this.#isSnapshotDue = false;
    this.#failures = 0;
    this.#aheadSince = null;
    if (!this.isDetached) this.#events.push({ type: "snapshot", id: frame.event_id, session: frame.session });
    this.#write({ op: "stream", value: this.record(now) });
    return this.key && frame.is_over ? this.#end(null, now) : this.#endIfDone(now);
  }

  #acknowledge(accepted, now) {
    if (accepted > this.acked || this.#chunks.some((chunk) => chunk.seqno < accepted)) {
      this.acked = Math.max(this.acked, Math.min(accepted, this.nextSeqno));
      this.#chunks = this.#chunks.filter((chunk) => chunk.seqno >= accepted);
      this.#write({ op: "acked", key: this.key, accepted }, { op: "stream", value: this.record(now) });
    }
    this.#playBack();
    this.#endIfDone(now);
  }

  /** Send what this connection has not sent: new chunks, and after a reconnect the unacknowledged ones again. */
  #playBack() {
    if (this.phase !== "live") return;
    for (const chunk of this.#chunks.slice(0, this.#inFlightMax)) {
      if (chunk.seqno < this.#sent) continue;
      this.#frames.push(chunk.frame);
      this.#sent = chunk.seqno + 1;
    }
  }

  #apply(events, now) {
    for (const { id, record } of events) {
      const at = parseEventId(id);
      if (this.#at === null) return "reconnect";
      if (at.position <= this.#at.position && at.epoch <= this.#at.epoch) continue; // shown before
      if (at.position !== this.#at.position + 1 || at.epoch < this.#at.epoch) return "reconnect"; // a hole
      this.#at = at;
      this.#failures = 0;
      this.#aheadSince = null;
      if (!this.isDetached) this.#events.push({ type: "record", id, record });
      const isOwn = this.key && record.stream === this.key;
      if (isOwn && (record.type === "message_accepted" || record.type === "turn_resumed"))
        this.turn = record.turn;
      if (isOwn && record.type === "message_withdrawn") return this.#end(null, now);
      const isMine = this.key && this.turn && record.turn;
      if (
        isMine &&
        (record.turn > this.turn || (record.type === "turn_ended" && record.turn === this.turn))
      ) {
        return this.#end(null, now);
      }
    }
    return this.#endIfDone(now);
  }

  /** An idle session with all chunks taken and all events seen owes this stream nothing. */
  #endIfDone(now) {
    if (!this.key || !this.isAcknowledged || this.phase !== "live" || this.nextSeqno === 0) return;
    if (this.#isGoneDue || this.#isSnapshotDue) return;
    const isOver = this.#turnEnd !== null && this.#at.position >= this.#turnEnd.position;
    if (this.isDetached || isOver) this.#end(null, now);
  }

  #heartbeat(frame) {
    this.#failures = 0;
    this.waitingOn = frame.waiting_on ?? "";
    // Ahead of us once may be an event under way; ahead twice with none between is one that was lost.
    const isAhead = this.#at !== null && parseEventId(frame.event_id).position > this.#at.position;
    if (isAhead && this.#aheadSince !== null && this.#aheadSince === this.#at.position) return "reconnect";
    this.#aheadSince = isAhead ? this.#at.position : null;
    return undefined;
  }

  #refused(frame, now) {
    const error = new MidstreamError(frame.code, frame.message, frame.retry, frame.retry_after_s ?? null);
    const canPlayBack =
      frame.code === "seqno_gap" && this.#chunks.some((chunk) => chunk.seqno === frame.expected);
    if (canPlayBack) return "reconnect";
    if (FINAL_CODES.has(error.code) || ["never", "ask"].includes(error.retry ?? "never")) return this.#end(error, now);
    this.#notBefore = now + 1000 * (error.retryAfterS ?? 0);
    return "reconnect";
  }

  #number(payload, now) {
    if (this.phase === "ended") throw this.error ?? new MidstreamError("usage", "this stream has ended");
    const seqno = this.nextSeqno;
    const frame = `{"type":"chunk","seqno":${seqno},"payload":${JSON.stringify(payload)}}`;
    const bytes = new TextEncoder().encode(frame).length;
    if (bytes > this.frameBytesMax) {
      const message = `this message takes ${bytes} bytes; a frame holds ${this.frameBytesMax}`;
      throw new MidstreamError("frame_too_large", message);
    }
    this.nextSeqno += 1;
    this.#chunks.push({ seqno, frame });
    this.#write(
      { op: "chunk", value: { key: this.key, seqno, frame } },
      { op: "stream", value: this.record(now) },
    );
    this.#playBack();
  }

  #write(...writes) {
    if (this.key && !this.isDegraded && this.phase !== "ended") this.#writes.push(...writes);
  }

  #move(cursor) {
    this.#at = cursor === null ? null : parseEventId(cursor);
  }

  #end(error, now) {
    if (this.phase === "ended") return;
    if (this.phase === "live") this.#frames.push('{"type":"close"}');
    if (this.key && !KEPT_CODES.has(error?.code)) this.#writes.push({ op: "forget", key: this.key });
    this.error = error;
    this.endedAt = now;
    this.#rest();
  }

  #rest() {
    this.phase = "ended";
    this.deadlineAt = Infinity;
  }
}
