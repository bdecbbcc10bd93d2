/**
 * The client's half of the stream protocol, without I/O: no socket, no clock, no storage.
 *
 * The order it asks for is always: write down, then send; apply by event id, then deliver. A command's frame is
 * built once, kept as that string and played back as that string, so that its bytes are the same whenever they
 * arrive.
 */

import { beganAnother, endsTooSoon, isDurable, knownAfter, standsInPlace } from "./promises.js";
import {
  HEARTBEATS_MISSED_MAX,
  HEARTBEAT_MAX_MS,
  RECONNECT_FIRST_MS,
  RECONNECT_MOST_MS,
  RETRY_AFTER_MAX_MS,
  STOPPED_PATIENCE_MS,
} from "./retries.js";
import { refuseBrokenText } from "./texts.js";

export const PROTOCOL_VERSION = 1;
/** Without anything new for so long the stream ends; it can still be taken up. */
export const PATIENCE_MS = 2 * 60 * 60 * 1000;
/** For a connection to be made. */
const CONNECT_WITHIN_MS = 10_000;
/** From a ping to anything at all. */
const PING_WITHIN_MS = 5000;
/** Somebody who looks again and again has a try each second, and not with every look. */
const WAKE_EVERY_MS = 1000;
const HEARTBEAT_S = 10;
/** Without an event for so long, a turn that waits for a machine has stalled. */
export const STALL_AFTER_MS = 60_000;
/** For the first connection to a server: it is long enough for three transports to be tried. */
export const REACH_WITHIN_MS = 20_000;
const MACHINES = new Set(["model", "tool", "client"]);
const IN_FLIGHT_MAX = 64;
const COMMANDS_MAX = 10_000;
/** Connections that one page makes of a stream: the numbers of the next page begin above them. */
const CONNECTIONS_OF_A_LIFE = 2 ** 24;
/** How a turn stands that is over. */
const OVER = new Set(["completed", "cancelled", "failed", "interrupted", "ended"]);
/** The statuses of a session with an open turn. */
export const OPEN = new Set(["running", "waiting", "locked"]);
/** A refusal that the same command will meet again, whatever its `retry` says of others. */
const BUSY = "session_busy";
const WRONG_SECRET = "wrong_secret";

/** Ends after which the stream may go on: elsewhere, later, or when its user has logged in again. */
const KEPT_CODES = new Set([
  "access",
  "connection_lost",
  "events_lost",
  "internal",
  "record_undecodable",
  "stream_fenced",
  "unauthorized",
]);

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

/** Read "3-17" into its numbers, or throw; "0" is the beginning, as "0-0" is. */
export function parseEventId(text) {
  if (text === "0") return { epoch: 0, position: 0 };
  const match = /^(\d{1,19})-(\d{1,19})$/.exec(text);
  if (!match) throw new MidstreamError("malformed_frame", `an event id looks like '3-17', not '${text}'`);
  return { epoch: Number(match[1]), position: Number(match[2]) };
}

/**
 * Return the milliseconds to wait after `failures` failures in a row, the first of them `outageMs` ago; `chance` is in [0, 1).
 * Short pauses by chance must not double the next ones within a second: none is longer than the outage so far (STREAM-29).
 */
export function backoffMs(failures, chance, outageMs = Infinity) {
  if (failures <= 0) return 0;
  const doubled = RECONNECT_FIRST_MS * 2 ** Math.min(failures - 1, 16);
  const most = Math.min(RECONNECT_MOST_MS, doubled, Math.max(RECONNECT_FIRST_MS, outageMs));
  return Math.round(most * (1 - chance));
}

/**
 * Return what was kept of a stream as it can be resumed: in the place of each command that is lost stands an outcome of no
 * call, which a server takes and drops (STREAM-48). `damage` says why it cannot be, or is "".
 */
export function mended(kept) {
  const { key, acked, nextSeqno, secret, cursor = null } = kept;
  if (typeof secret !== "string") return { ...kept, damage: "its secret is gone" };
  const commands = [];
  for (let seqno = acked; seqno < nextSeqno; seqno += 1) {
    const found = kept.commands.find((command) => command.seqno === seqno);
    const isWhole = found !== undefined && read(found.frame)?.seqno === seqno;
    if (!isWhole && seqno === 0 && cursor === null)
      return { ...kept, damage: `command ${seqno} ${found === undefined ? "is missing" : "cannot be read"}` };
    commands.push(isWhole ? found : { key, seqno, frame: fillerOf(seqno), isFiller: true });
  }
  return { ...kept, commands, damage: "" };
}

function fillerOf(seqno) {
  const result = { call_id: "", content: "", outcome: "unknown" };
  return JSON.stringify({ type: "command", seqno, payload: { type: "result", turn: 0, response: 0, result } });
}

/**
 * The client's half of one stream, without I/O.
 *
 * Times are milliseconds of a clock that is never set, and always the last argument but for what may be left out. After
 * every call: carry out `take()` in its order (writes, then frames, then events), keep a connection exactly while
 * `wantsSocket`, and call `tick` at `dueAt`. Calling anything early or twice is harmless. Nothing the server sends makes
 * a method throw.
 *
 * Phases: "waiting" (until `deadlineAt`, then a connection is wanted), "connecting" (it is being made), "opening" (the
 * welcome is owed), "live", "ended" (`error` says why, or is null).
 */
export class Stream {
  #at = null; // where the line of events stands, parsed
  #promised = null; // the newest event that was seen of those that the server may not lose
  #known = null; // the newest epoch of which the server said when it began
  #commands = []; // not acknowledged: {seqno, frame}, in order
  #apart = new Set(); // those of them that were acknowledged one by one (STREAM-53)
  #writes = [];
  #frames = [];
  #events = [];
  #sent = 0; // commands below this went out on this connection
  #inFlightMax = IN_FLIGHT_MAX;
  #silenceMs = HEARTBEATS_MISSED_MAX * 1000 * HEARTBEAT_S;
  #failures = 0;
  #lostAt = 0; // when the first of them was
  #notBefore = 0;
  #wokenAt = -Infinity;
  #isPinged = false; // an answer is owed
  #turnEnd = null; // where the welcome says that this stream's turn is over: the position its words hold for
  #isSnapshotDue = false; // a `gone` said that one follows
  #isGoneDue = false; // the welcome goes on elsewhere than asked: an event, a `gone` or a snapshot comes first
  #announced = null; // the position a heartbeat spoke of; if it has not come by the next one, it is lost
  #unanswered = 0; // heartbeats that came while an ack was owed
  #isBegun; // its first record was seen: what stands before is not its business
  #isKnown; // its server was heard, by this page or one before it
  #isQueued = false; // its message waits for the turns before it, which are not its business
  #abortSeqno = null; // the command that stops the turn
  #isOver = false; // it ended well, and its application may have events to handle
  #isForgotten = false;
  #keptAs; // the key under which it is written down
  #own; // the secret it began with
  #shown = ""; // the secrets that this connection was opened with
  #refusal = null; // {error, shown}: these the server did not take
  #patienceMs;
  #stallAfterMs;
  #connection; // number of the last connection
  #stallAt = Infinity;
  #isWaitKnown = false; // a heartbeat came since the last event
  #isWaitAsked = false; // one was requested, since the turn may have stalled
  #reachWithinMs;
  #reachBy; // when it ends unless the server was heard before; Infinity once it was
  #loss = ""; // why the last connection was not made

  /**
   * @param kept What `record` gave before, with its `secret` and the `commands` that were not acknowledged; or a new
   *   stream's `{session, key, cursor}`, whose events begin after `cursor`, else with its own first one, and which is
   *   told its secret by `unlock`. Without `key` it only follows the session. With `damage` its commands are lost: it shows
   *   the session as it is, to the end of the turn that runs.
   * @param limits How long what is waited for.
   */
  constructor(kept, now = 0, limits = {}) {
    const { patienceMs = PATIENCE_MS, stallAfterMs = STALL_AFTER_MS, reachWithinMs = Infinity } = limits;
    this.session = kept.session;
    this.damage = kept.damage ?? "";
    this.#keptAs = kept.key ?? "";
    this.key = this.damage ? "" : this.#keptAs;
    this.secret = kept.secret ?? "";
    this.oldSecret = "";
    this.#own = this.key ? this.secret : "";
    this.turn = kept.turn ?? 0;
    this.acked = kept.acked ?? 0;
    this.nextSeqno = kept.nextSeqno ?? 0;
    this.openedAt = kept.openedAt ?? now;
    this.cancelAfterS = kept.cancelAfterS ?? null;
    this.life = kept.life === undefined ? 0 : kept.life + 1;
    this.isWhole = kept.isWhole ?? (!this.key || (kept.cursor ?? null) !== null);
    this.phase = "waiting";
    this.deadlineAt = now;
    this.error = null;
    this.trouble = null;
    this.isDegraded = false;
    this.isReconnecting = false;
    this.isStalled = false;
    this.isDetached = kept.isDetached ?? false;
    this.isEncrypted = null; // not told yet
    this.status = "";
    this.waitingOn = "";
    this.frameBytesMax = 1024 * 1024;
    this.#lostAt = now;
    this.#patienceMs = patienceMs;
    this.#stallAfterMs = stallAfterMs;
    this.#connection = this.life * CONNECTIONS_OF_A_LIFE;
    this.#isBegun = this.isWhole || (kept.cursor ?? null) !== null;
    this.#isKnown = this.life > 0;
    this.#reachWithinMs = this.#isKnown ? Infinity : reachWithinMs;
    this.#reachBy = now + this.#reachWithinMs;
    this.#move(this.damage ? null : (kept.cursor ?? null));
    this.#promised = this.key && kept.promised ? parseEventId(kept.promised) : null;
    this.#known = (this.key && kept.known) || null;
    this.#commands = this.damage ? [] : [...(kept.commands ?? [])].sort((a, b) => a.seqno - b.seqno);
    this.#abortSeqno = this.#commands.find(({ frame }) => read(frame)?.payload?.type === "cancel")?.seqno ?? null;
    if (this.damage) this.#tell({ type: "lost", id: "0-0", reason: this.damage });
    // STREAM-50: the numbers of this page's connections are above those of the page before, also of one that dies.
    else if (kept.life !== undefined) this.#write({ op: "stream", value: this.record() });
  }

  /** The last event this stream has, or null where it has not begun. */
  get cursor() {
    return told(this.#at);
  }

  get wantsSocket() {
    return this.phase === "connecting" || this.phase === "opening" || this.phase === "live";
  }

  /** When to call `tick`; Infinity while nothing is owed. */
  get dueAt() {
    return Math.min(this.deadlineAt, this.#stallAt, this.#reachBy);
  }

  /** Whether every command is in the server's journal. */
  get isAcknowledged() {
    return this.#commands.length === 0;
  }

  /** Whether it ended with its turn, and not because its reader let go of it. */
  get isOver() {
    return this.#isOver && this.key !== "" && !this.isDetached;
  }

  /** Whether its message waits for the turns before it. */
  get isQueued() {
    return this.#isQueued;
  }

  /** Whether something of it is written down. */
  get isKept() {
    return this.key !== "" && !this.isDegraded && !this.#isForgotten;
  }

  /** The message that is not acknowledged yet, or null. */
  get pendingText() {
    for (const { frame } of this.#commands) {
      const { payload } = JSON.parse(frame);
      if (payload.type === "send") return payload.parts.map((part) => part.text ?? "").join("");
    }
    return null;
  }

  /** What must be known of this stream to take it up again; its secret and its commands are kept apart. */
  record() {
    const { session, key, cursor, turn, acked, nextSeqno, openedAt } = this;
    const { isDetached, isWhole, life, cancelAfterS } = this;
    const kept = { session, key, cursor, turn, acked, nextSeqno, openedAt, isDetached, isWhole, life, cancelAfterS };
    return { ...kept, promised: told(this.#promised), known: this.#known };
  }

  // --- what the application says ---

  /** Number a user's message. Throws, with nothing changed, if it is larger than a frame may be, or has half a character. */
  say(text, now, whenBusy = "queue") {
    if (typeof text !== "string") throw new MidstreamError("usage", `a message is a string, not ${typeof text}. Nothing was sent`);
    const payload = { type: "send", parts: [{ type: "text", text }] };
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

  /** Number a request to stop `turn`, or whichever turn runs, and try to connect for it. Asking twice is harmless. */
  abort(turn, now) {
    if (this.#abortSeqno !== null || this.phase === "ended") return;
    this.#number(turn ? { type: "cancel", turn } : { type: "cancel" }, now);
    this.#abortSeqno = this.nextSeqno - 1;
    if (this.phase === "waiting") this.wake(now);
  }

  /**
   * Show the secret of the session from now on, where one is known. One that it began with is shown beside it, if it is
   * another: the session's was changed since, or it began when each stream had its own. What the server has refused is not
   * shown again: then the stream ends (STREAM-96).
   */
  unlock({ secret, oldSecret = "" }, now) {
    if (secret) this.#show(secret, oldSecret);
    const refusal = this.#refusal;
    this.#refusal = null;
    if (refusal?.shown === this.#secrets) this.#end(refusal.error, now);
  }

  get #secrets() {
    return `${this.secret} ${this.oldSecret}`;
  }

  #show(secret, oldSecret) {
    if (this.key && !this.#own) {
      this.#own = secret;
      if (this.nextSeqno > 0) this.#write({ op: "secret", value: { key: this.key, secret } });
    }
    this.secret = secret;
    this.oldSecret = oldSecret || (this.#own === secret ? "" : this.#own);
  }

  /** Deliver nothing more; the stream lives on until its commands are acknowledged, and is forgotten then. */
  detach(now) {
    this.isDetached = true;
    this.#events = [];
    if (this.phase === "ended") this.finished();
    else if (this.isAcknowledged) this.#end(null, now);
    else this.#write({ op: "stream", value: this.record() });
  }

  /** Leave at once and keep what is written down, so that another page can take it up. */
  leave() {
    if (this.phase === "live") this.#frames.push('{"type":"close"}');
    this.#rest();
  }

  /** The application has handled all events of a stream that ended: nothing of it need be kept (STREAM-26). */
  finished() {
    if (this.#isOver) this.#forget();
  }

  // --- what the shell tells ---

  /** There is a connection. */
  opened(now) {
    if (this.phase !== "connecting") return;
    this.phase = "opening";
    this.#shown = this.#secrets;
    this.#sent = this.acked;
    this.#connection += 1;
    this.#frames.push(JSON.stringify(this.#opening()));
    this.#sendCommands();
    this.heard(now);
  }

  #opening() {
    const { key: stream, secret, oldSecret: old_secret, isWhole, cancelAfterS } = this;
    const event_id = this.#isBegun ? this.cursor : null;
    const open = { type: "open", version: PROTOCOL_VERSION, event_id };
    open.snapshots = this.damage ? "begin" : "gone";
    if (secret) open.secret = secret;
    if (old_secret) open.old_secret = old_secret;
    if (!stream) return open;
    // STREAM-6: of a stream whose first command is not known to have arrived the server need not know, and an event id
    // that is the session's and not the stream's would say that it should.
    const next_seqno = isWhole && event_id !== null && this.acked === 0 ? 0 : this.nextSeqno;
    const identity = { stream, next_seqno, connection: this.#connection };
    return { ...open, ...identity, ...(cancelAfterS === null ? {} : { cancel_after_s: cancelAfterS }) };
  }

  /** The connection ended, or was never made: why, where `error` is known. `notBefore` keeps the next one away. */
  lost(chance, now, { notBefore = 0, error = null } = {}) {
    if (this.phase === "ended" || this.phase === "waiting") return this.#keepAway(notBefore);
    this.#frames = [];
    this.#isPinged = false;
    this.#moved(Infinity);
    if (this.isDegraded) {
      const message = "the connection broke and this server cannot resume";
      return this.#end(error ?? new MidstreamError("connection_lost", message, "later"), now);
    }
    if (error?.code === WRONG_SECRET) this.#refusal = { error, shown: this.#shown };
    else if (error !== null && ["never", "ask"].includes(error.retry) && !this.#willGo(error)) return this.#end(error, now);
    if (error !== null && error.code !== "connection_lost") this.trouble = error;
    this.#loss = error?.message ?? this.#loss;
    if (this.#failures === 0) this.#lostAt = now;
    this.#failures += 1;
    const isStopped = this.#abortSeqno !== null && this.#abortSeqno < this.acked;
    const patienceMs = isStopped ? Math.min(STOPPED_PATIENCE_MS, this.#patienceMs) : this.#patienceMs;
    if (this.#failures > 1 && now - this.#lostAt >= patienceMs) {
      const message = `no connection could be kept for ${patienceMs / 1000} s`;
      return this.#end(new MidstreamError("connection_lost", message, "later"), now);
    }
    this.phase = "waiting";
    this.isReconnecting = true;
    this.#askedToWait(error, now);
    // The first try comes at once: most cuts are short. The last one comes when patience ends, and not after that.
    const pauseMs = backoffMs(this.#failures - 1, chance, now - this.#lostAt);
    this.deadlineAt = Math.min(now + pauseMs, this.#lostAt + patienceMs);
    return this.#keepAway(notBefore);
  }

  /** Whether it is said by somebody who answers where the server was, and not for good (STREAM-107). */
  #willGo(error) {
    return this.#isKnown && error.isForeign === true && error.code !== "access";
  }

  #askedToWait(error, now) {
    const askedMs = Math.min(1000 * (error?.retryAfterS ?? 0), RETRY_AFTER_MAX_MS);
    this.#notBefore = Math.max(this.#notBefore, now + askedMs);
  }

  #keepAway(notBefore) {
    this.#notBefore = Math.max(this.#notBefore, notBefore);
    if (this.phase === "waiting") this.deadlineAt = Math.max(this.deadlineAt, this.#notBefore);
  }

  /** The network may be back, or somebody is looking: try now, or make sure that the line still lives. */
  wake(now) {
    if (this.phase === "waiting") {
      const soonest = Math.max(now, this.#notBefore, this.#wokenAt + WAKE_EVERY_MS);
      if (soonest < this.deadlineAt) this.#wokenAt = this.deadlineAt = soonest;
    } else if (this.phase === "live" && !this.#isPinged) {
      this.#isPinged = true;
      this.#frames.push('{"type":"ping"}');
      this.deadlineAt = Math.min(this.deadlineAt, now + PING_WITHIN_MS);
    }
  }

  /**
   * Time passed. Returns whether the connection, if any, must be given up (then call `lost`).
   *
   * `isLate`: this page did not run for a while (asleep, frozen, in the background), so that what came meanwhile may
   * still stand in a queue. Silence is not judged then: the server is asked first.
   */
  tick(now, isLate = false) {
    if (now >= this.#reachBy) {
      if (!isLate) return this.#endUnreached(now);
      this.#reachBy = now + this.#reachWithinMs; // nothing was tried meanwhile
    }
    if (isLate && this.phase === "live" && !this.#isPinged) {
      this.#moved(now);
      this.deadlineAt = Infinity;
      this.wake(now);
      return false;
    }
    if (now >= this.#stallAt) {
      // STREAM-47: reported, and nothing else. What is waited for stands in heartbeats only.
      if (this.#isWaitKnown) this.#judgeSilence(now);
      else {
        this.#isWaitAsked = true;
        this.#stallAt = Infinity;
        this.#frames.push('{"type":"ping"}');
      }
    }
    if (now < this.deadlineAt) return false;
    if (this.phase === "waiting") {
      this.phase = "connecting";
      this.deadlineAt = now + CONNECT_WITHIN_MS;
      return false;
    }
    return this.wantsSocket;
  }

  /** A person may be waited for; then this is decided again later. */
  #judgeSilence(now) {
    this.isStalled = MACHINES.has(this.waitingOn);
    this.#stallAt = this.isStalled ? Infinity : now + this.#stallAfterMs;
  }

  /** Bytes came: a whole frame, or a part of one (STREAM-46). */
  heard(now) {
    if (this.phase !== "opening" && this.phase !== "live") return;
    this.#isPinged = false;
    this.deadlineAt = now + this.#silenceMs;
  }

  /** Take one message off the wire. Returns whether the connection must be given up (then call `lost`). */
  receive(text, now) {
    if (this.phase !== "opening" && this.phase !== "live") return false;
    const before = this.phase === "live" ? this.cursor : "";
    try {
      const frame = JSON.parse(text);
      const outcome = this.#receive(frame, now);
      if (this.phase === "live" && before !== this.cursor && !isSilence(frame)) this.#moved(now);
      this.heard(now);
      return outcome === "reconnect";
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
    if (frame.type === "error") return this.#refused(frame, now);
    if (this.phase === "opening" && frame.type !== "welcome") return KNOWN.has(frame.type) ? "reconnect" : undefined;
    switch (frame.type) {
      case "welcome":
        return this.phase === "live" ? "reconnect" : this.#welcome(frame, now);
      case "ack":
        return frame.is_single ? this.#acknowledgeOne(frame.seqno, now) : this.#acknowledge(frame.seqno + 1, now);
      case "events":
        return this.#apply(frame.events, now);
      case "gone":
        return this.#gone(frame, now);
      case "snapshot":
        return this.#replace(frame, now);
      case "heartbeat":
        return this.#heartbeat(frame, now);
      default:
        return undefined; // a newer server's frame; the version in the welcome says which matter
    }
  }

  #welcome(frame, now) {
    const from = parseEventId(frame.resume_from);
    const acked = frame.acked ?? 0;
    this.phase = "live";
    this.#isKnown = true;
    this.#reachBy = Infinity;
    this.isReconnecting = false;
    this.isDegraded = frame.is_degraded ?? false;
    this.isEncrypted = frame.is_encrypted ?? false;
    this.status = frame.status ?? "";
    this.frameBytesMax = frame.frame_bytes_max ?? this.frameBytesMax;
    this.#inFlightMax = Math.max(1, Math.min(frame.in_flight_max ?? IN_FLIGHT_MAX, IN_FLIGHT_MAX));
    if ((frame.heartbeat_s ?? HEARTBEAT_S) > 0) {
      const beatMs = Math.min(1000 * (frame.heartbeat_s ?? HEARTBEAT_S), HEARTBEAT_MAX_MS);
      this.#silenceMs = HEARTBEATS_MISSED_MAX * beatMs;
    }
    this.#notBefore = 0;
    this.#announced = null;
    this.#unanswered = 0;
    this.turn = frame.turn || this.turn;
    this.#isQueued = this.key !== "" && acked > 0 && !this.turn && !this.isDetached;
    this.#isGoneDue = !this.#isBegun || frame.resume_from !== this.cursor;
    if (!this.#isBegun || this.#at === null) this.#at = from;
    this.#isSnapshotDue = false;
    this.#moved(now);
    if (this.isDegraded && this.key) this.#writes.push({ op: "forget", key: this.key });
    if (this.key && acked > this.nextSeqno) {
      // What is kept here is older than what was sent: its numbers would be given out again (STREAM-11).
      const message = `the server has ${acked} commands of this stream, and ${this.nextSeqno} were numbered here`;
      return this.#end(new MidstreamError("seqno_reused", message), now);
    }
    const newest = parseEventId(frame.event_id);
    if (endsTooSoon(this.#promised, newest, this.key !== "")) return this.#endLost(`ends with ${told(newest)}`, now);
    if (this.#isSetBack(from.epoch, frame.began_at ?? null)) return this.#endSetBack(from.epoch, now);
    if (this.key && acked < this.acked) {
      // Acknowledged commands are gone from here too: they cannot be played back.
      const message = "the server no longer knows this stream";
      return this.#end(new MidstreamError("stream_not_found", message), now);
    }
    this.#turnEnd = OVER.has(frame.turn_status) ? parseEventId(frame.event_id) : null;
    return this.key ? this.#acknowledge(acked, now) : undefined;
  }

  #gone(frame, now) {
    this.#move(frame.resume_from);
    this.#isBegun = this.isWhole;
    this.#announced = null;
    this.#isGoneDue = false;
    this.#isSnapshotDue = frame.has_snapshot ?? false;
    const { resume_from: id, reason, has_snapshot: hasSnapshot = false } = frame;
    this.#tell({ type: "gone", id, reason, hasSnapshot });
    this.#write({ op: "stream", value: this.record() });
    return this.#endIfDone(now);
  }

  /** Go on behind a snapshot, which stands for all events up to it. */
  #replace(frame, now) {
    this.#move(frame.event_id);
    this.#isBegun = true;
    this.#isGoneDue = this.#isSnapshotDue = false;
    if (this.key && frame.turn) {
      this.turn = frame.turn;
      this.#isQueued = false;
    }
    this.#announced = null;
    this.#progressed();
    const { event_id: id, session, turn = null } = frame;
    this.#tell({ type: "snapshot", id, session, turn });
    this.#write({ op: "stream", value: this.record() });
    if (this.damage) return !OPEN.has(frame.session?.status) ? this.#end(null, now) : undefined;
    return this.key && frame.is_over ? this.#end(null, now) : this.#endIfDone(now);
  }

  /** Take an ack of all commands below `accepted`. */
  #acknowledge(accepted, now) {
    if (!(accepted <= this.nextSeqno)) return "reconnect"; // of what was never sent
    if (accepted > this.acked || this.#commands.some((command) => command.seqno < accepted)) {
      this.acked = Math.max(this.acked, accepted);
      this.#commands = this.#commands.filter((command) => command.seqno >= accepted);
      this.#sent = Math.max(this.#sent, accepted);
      this.#unanswered = 0;
      this.#progressed();
      this.#write({ op: "acked", key: this.key, accepted }, { op: "stream", value: this.record() });
    }
    this.#sendCommands();
    return this.#endIfDone(now);
  }

  /** Take an ack of one command alone: it is kept until all before it are acknowledged too (STREAM-53). */
  #acknowledgeOne(seqno, now) {
    if (!(seqno >= 0 && seqno < this.nextSeqno)) return "reconnect";
    if (seqno > this.acked) this.#apart.add(seqno);
    if (seqno !== this.acked) return undefined;
    let accepted = seqno + 1;
    while (this.#apart.delete(accepted)) accepted += 1;
    return this.#acknowledge(accepted, now);
  }

  /** Send what this connection has not sent: new commands, and after a reconnect the unacknowledged ones again. */
  #sendCommands() {
    if (this.phase !== "opening" && this.phase !== "live") return;
    const room = this.acked + this.#apart.size + this.#inFlightMax;
    for (const { seqno, frame, isFiller } of this.#commands) {
      if (seqno < this.#sent || seqno >= room) continue;
      if (isFiller && this.phase === "opening") return; // the server may have the command that was lost
      if (!this.#apart.has(seqno)) this.#frames.push(frame);
      this.#sent = seqno + 1;
    }
  }

  #apply(events, now) {
    for (const { id, record } of events) {
      if (this.phase === "ended") return undefined;
      const at = parseEventId(id);
      if (at.position <= this.#at.position && at.epoch <= this.#at.epoch) continue; // shown before
      if (at.position !== this.#at.position + 1 || at.epoch < this.#at.epoch) return "reconnect"; // a hole
      const began = record.type === "epoch_started" ? (record.at ?? null) : null;
      if (this.#isSetBack(at.epoch, began)) return this.#endSetBack(at.epoch, now);
      if (standsInPlace(this.#promised, at, this.key !== "")) return this.#endLost(`has ${id} in its place`, now);
      if (isDurable(record) && !(this.key && at.position <= this.#promised?.position)) this.#promised = at;
      this.#at = at;
      this.#isGoneDue = false;
      this.#progressed();
      if (this.#takeRecord(id, record, now) === "reconnect") return "reconnect";
    }
    return this.#endIfDone(now);
  }

  #takeRecord(id, record, now) {
    const isOwn = this.key !== "" && record.stream === this.key;
    if (isOwn) this.#isBegun = true; // its own first record is `stream_opened`
    if (!this.#isBegun) return undefined;
    if (isOwn && record.type === "message_queued") this.#isQueued = true;
    if (isOwn && record.type === "message_accepted") this.#isQueued = false;
    if (isOwn || this.isWhole || !this.#isQueued) this.#tell({ type: "record", id, record });
    if (this.damage && record.type === "turn_ended") return this.#end(null, now);
    if (!this.key) return undefined;
    if (isOwn && (record.type === "message_accepted" || record.type === "turn_resumed")) this.turn = record.turn;
    if (isOwn && record.type === "command_accepted") return this.#acknowledge(record.seqno + 1, now);
    const isTaken = isOwn && record.type === "message_withdrawn";
    const isEnd = this.turn > 0 && record.type === "turn_ended" && record.turn === this.turn;
    return isTaken || isEnd ? this.#end(null, now) : undefined;
  }

  /** A turn that is over, with all commands taken and all events seen, owes this stream nothing. */
  #endIfDone(now) {
    if (!this.key || !this.isAcknowledged || this.phase !== "live" || this.nextSeqno === 0) return undefined;
    if (this.#isGoneDue || this.#isSnapshotDue) return undefined;
    const isOver = this.#turnEnd !== null && this.#at.position >= this.#turnEnd.position;
    return this.isDetached || isOver ? this.#end(null, now) : undefined;
  }

  #heartbeat(frame, now) {
    const newest = parseEventId(frame.event_id).position;
    this.waitingOn = frame.waiting_on ?? "";
    this.#isWaitKnown = true;
    if (this.#isWaitAsked) this.#judgeSilence(now);
    this.#isWaitAsked = false;
    if (this.#announced !== null && this.#at.position < this.#announced) return "reconnect";
    this.#announced = newest;
    if (this.#sent > this.acked + this.#apart.size) this.#unanswered += 1;
    if (this.#unanswered >= HEARTBEATS_MISSED_MAX) return "reconnect"; // STREAM-14
    this.#failures = 0;
    return undefined;
  }

  #refused(frame, now) {
    const error = new MidstreamError(frame.code, frame.message, frame.retry, frame.retry_after_s ?? null);
    const canPlayBack =
      frame.code === "seqno_gap" && this.#commands.some((command) => command.seqno === frame.expected);
    const isFinal = error.code === BUSY || error.retry === "never" || error.retry === "ask";
    if (!this.isDegraded && error.code === WRONG_SECRET) {
      this.#refusal = { error, shown: this.#shown };
      return "reconnect";
    }
    if (this.isDegraded || (isFinal && !canPlayBack)) return this.#end(error, now);
    this.trouble = error;
    this.#askedToWait(error, now);
    return "reconnect";
  }

  #number(payload, now) {
    if (this.phase === "ended") throw this.error ?? new MidstreamError("usage", "this stream has ended");
    refuseBrokenText(payload);
    if (this.nextSeqno >= COMMANDS_MAX) throw new MidstreamError("usage", `a stream takes ${COMMANDS_MAX} commands at most`);
    const seqno = this.nextSeqno;
    const frame = `{"type":"command","seqno":${seqno},"payload":${JSON.stringify(payload)}}`;
    const bytes = new TextEncoder().encode(frame).length;
    if (bytes > this.frameBytesMax) {
      const message = `this message takes ${bytes} bytes; a frame holds ${this.frameBytesMax}`;
      throw new MidstreamError("frame_too_large", message);
    }
    this.nextSeqno += 1;
    this.#commands.push({ seqno, frame });
    if (seqno === 0 && this.secret) this.#write({ op: "secret", value: { key: this.key, secret: this.secret } });
    this.#write({ op: "command", value: { key: this.key, seqno, frame } }, { op: "stream", value: this.record() });
    this.#sendCommands();
  }

  #tell(event) {
    if (!this.isDetached) this.#events.push(event);
  }

  /** Something new came: the next failure is a first one. */
  #progressed() {
    this.#failures = 0;
    this.trouble = null;
  }

  /** Count the turn's silence from `now` on; Infinity: there is no line to hear it on. */
  #moved(now) {
    this.isStalled = this.#isWaitKnown = this.#isWaitAsked = false;
    this.#stallAt = this.key && this.phase === "live" ? now + this.#stallAfterMs : Infinity;
  }

  #write(...writes) {
    if (this.isKept && this.phase !== "ended") this.#writes.push(...writes);
  }

  #move(cursor) {
    this.#at = cursor === null ? null : parseEventId(cursor);
  }

  #forget() {
    if (this.#keptAs && !this.#isForgotten) this.#writes.push({ op: "forget", key: this.#keptAs });
    this.#isForgotten = true;
  }

  #end(error, now) {
    if (this.phase === "ended") return;
    if (this.phase === "live" && error === null) this.#frames.push('{"type":"close"}');
    this.error = error;
    this.endedAt = now;
    this.#rest();
    this.#isOver = error === null;
    if (error === null ? this.isDetached : !KEPT_CODES.has(error.code)) this.#forget();
  }

  /** Take when an epoch began; return whether the server had said otherwise of it before. */
  #isSetBack(epoch, beganAt) {
    if (beganAnother(this.#known, this.#promised, epoch, beganAt)) return true;
    this.#known = knownAfter(this.#known, this.#promised, epoch, beganAt);
    return false;
  }

  #endSetBack(epoch, now) {
    return this.#endLost(`began epoch ${epoch} another time since`, now);
  }

  #endLost(what, now) {
    const message = `the server had ${told(this.#promised)} on its disk, and ${what}`;
    return this.#end(new MidstreamError("events_lost", `${message}: its journal was cut, or is an older copy`), now);
  }

  #endUnreached(now) {
    const why = this.#loss && ` (last: ${this.#loss})`;
    const advice = "check its address and scheme, and that it allows this page's origin (midstream serve --allow-origin)";
    const message = `no connection to the server within ${this.#reachWithinMs / 1000} s${why}: ${advice}`;
    return this.#end(new MidstreamError("connection_lost", message, "later"), now);
  }

  #rest() {
    this.phase = "ended";
    this.deadlineAt = this.#stallAt = this.#reachBy = Infinity;
    this.isReconnecting = this.isStalled = false;
    this.trouble = null;
  }
}

/** Whether a frame only reports that nothing came (STREAM-47). */
function isSilence({ type, events }) {
  return type === "events" && events.every(({ record }) => record.type === "stall_noticed");
}

/** Frames that come after a welcome. */
const KNOWN = new Set(["ack", "events", "gone", "snapshot", "heartbeat"]);

function told(at) {
  return at && `${at.epoch}-${at.position}`;
}

function read(frame) {
  try {
    return JSON.parse(frame);
  } catch {
    return null;
  }
}
