/**
 * The client's half of the stream protocol, without I/O: no socket, no clock, no storage.
 *
 * A command is stored before it is sent. An event is applied by its id before it is delivered. The frame of a command is
 * built once, stored as this string, and played back as this string. So all repetitions have the same bytes.
 */

import { hasLostPromised, hasOtherBeginning, isDurable, isReplaced, newestEpochAfter } from "./promises.js";
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
/** Time without a working connection after which the stream ends. It can still be resumed. */
export const PATIENCE_MS = 2 * 60 * 60 * 1000;
/** Limit for the opening of a connection. */
const CONNECT_WITHIN_MS = 10_000;
/** Limit from a ping to the next bytes. */
const PING_WITHIN_MS = 5000;
/** Shortest time between two tries that `wake` starts. */
const WAKE_EVERY_MS = 1000;
const HEARTBEAT_S = 10;
/** Time without an event after which a turn that waits for a machine has stalled. */
export const STALL_AFTER_MS = 60_000;
/** Limit for the first connection to a server. It is enough for three transports. */
export const REACH_WITHIN_MS = 20_000;
/** Values of `waitingOn` for which silence is a stall. A person may take days. */
const MACHINES = new Set(["model", "tool", "client"]);
const IN_FLIGHT_MAX = 64;
const COMMANDS_MAX = 10_000;
/** Connections that one page can make for a stream. The connection numbers of the next page begin above them. */
const CONNECTIONS_PER_LIFE = 2 ** 24;
/** The statuses of a turn that has ended. */
const ENDED_STATUSES = new Set(["completed", "cancelled", "failed", "interrupted", "ended"]);
/** The statuses of a session with an open turn. */
export const OPEN_STATUSES = new Set(["running", "waiting", "locked"]);
/** The code of a refusal that the same command always gets again, with any `retry`. */
const BUSY = "session_busy";
/** The `retry` of refusals that the same request always gets again. */
export const FINAL_RETRIES = new Set(["never", "ask"]);
/** The code of a refusal of the session's secret. */
export const WRONG_SECRET = "wrong_secret";
export const CLOSE_FRAME = '{"type":"close"}';
export const PING_FRAME = '{"type":"ping"}';

/** Codes of errors after which the stream can be resumed: elsewhere, later, or after a new login. */
const RESUMABLE_CODES = new Set([
  "access",
  "connection_lost",
  "events_lost",
  "internal",
  "record_undecodable",
  "stream_fenced",
  "unauthorized",
]);

/** A refusal of the server, or an error of the client. `code` is stable; `retry` is "never", "later", "now" or "ask". */
export class MidstreamError extends Error {
  constructor(code, message, retry = "never", retryAfterS = null) {
    super(message);
    this.name = "MidstreamError";
    this.code = code;
    this.retry = retry;
    this.retryAfterS = retryAfterS;
  }
}

/** Parse an event id such as "3-17", or throw. "0" is the same as "0-0", the beginning. */
export function parseEventId(text) {
  if (text === "0") return { epoch: 0, position: 0 };
  const match = /^(\d{1,19})-(\d{1,19})$/.exec(text);
  if (!match) throw new MidstreamError("malformed_frame", `the event id is '${text}'; expected one such as '3-17'`);
  return { epoch: Number(match[1]), position: Number(match[2]) };
}

/**
 * Return the milliseconds to wait after `failures` failures in a row, the first of them `outageMs` ago. `chance` is in
 * [0, 1). No pause is longer than the outage so far, so that several short pauses cannot cause a long one (STREAM-29).
 */
export function backoffMs(failures, chance, outageMs = Infinity) {
  if (failures <= 0) return 0;
  const doubled = RECONNECT_FIRST_MS * 2 ** Math.min(failures - 1, 16);
  const most = Math.min(RECONNECT_MOST_MS, doubled, Math.max(RECONNECT_FIRST_MS, outageMs));
  return Math.round(most * (1 - chance));
}

/**
 * Return a stored stream with all its commands, so that it can be resumed. A filler replaces each lost command: the outcome
 * of no call, which the server accepts and ignores (STREAM-48). `damage` is the reason why it cannot be resumed, or "".
 */
export function restoreCommands(stored) {
  const { key, acked, nextSeqno, secret, cursor = null } = stored;
  if (typeof secret !== "string") return { ...stored, damage: "its secret is gone" };
  const commands = [];
  for (let seqno = acked; seqno < nextSeqno; seqno += 1) {
    const found = stored.commands.find((command) => command.seqno === seqno);
    const isWhole = found !== undefined && parseFrame(found.frame)?.seqno === seqno;
    if (!isWhole && seqno === 0 && cursor === null)
      return { ...stored, damage: `command ${seqno} ${found === undefined ? "is missing" : "cannot be read"}` };
    commands.push(isWhole ? found : { key, seqno, frame: filler(seqno), isFiller: true });
  }
  return { ...stored, commands, damage: "" };
}

function filler(seqno) {
  const result = { call_id: "", content: "", outcome: "unknown" };
  return JSON.stringify({ type: "command", seqno, payload: { type: "result", turn: 0, response: 0, result } });
}

/**
 * The client's half of one stream, without I/O.
 *
 * Times are milliseconds of a monotonic clock; `now` is the last required argument. After every call: do what `take()`
 * returns in its order (writes, then frames, then events), have a connection exactly while `isConnectionWanted`, and call
 * `tick` at `dueAt`. Early and repeated calls are harmless. No frame of the server makes a method throw.
 *
 * | phase | meaning |
 * | --- | --- |
 * | "waiting" | no connection until `deadlineAt` |
 * | "connecting" | the connection is being made |
 * | "opening" | the connection is open; the welcome is due |
 * | "live" | the welcome was received |
 * | "ended" | `error` is the reason, or null |
 */
export class Stream {
  #at = null; // the last applied event id, parsed
  #promised = null; // the newest received event that the server must not lose
  #newestEpoch = null; // the newest epoch whose beginning the server has sent
  #commands = []; // the unacknowledged commands: {seqno, frame}, in order
  #ackedSingly = new Set(); // their numbers that were acknowledged one by one (STREAM-53)
  #writes = [];
  #frames = [];
  #events = [];
  #sent = 0; // commands below this number were sent on this connection
  #inFlightMax = IN_FLIGHT_MAX;
  #silenceMs = HEARTBEATS_MISSED_MAX * 1000 * HEARTBEAT_S;
  #failures = 0;
  #lostAt = 0; // the time of the first of these failures
  #notBefore = 0;
  #wokenAt = -Infinity;
  #isPinged = false; // a ping was sent, and its answer is due
  #turnEnd = null; // the newest event at the welcome, if the turn had ended by then
  #isSnapshotDue = false; // a snapshot follows the `gone`
  #isGoneDue = false; // the welcome continues elsewhere than requested: an event, a `gone` or a snapshot comes first
  #announced = null; // the position in the last heartbeat; its event must come before the next heartbeat
  #unanswered = 0; // heartbeats received while an ack was due
  #isBegun; // the first record of the stream was received; earlier records are not delivered
  #isReached; // the server sent a welcome, to this page or an earlier one
  #isQueued = false; // the message waits for the turns before it, which are not delivered
  #abortSeqno = null; // the number of the command that cancels the turn
  #isOver = false; // it ended without an error; the application may still have events to handle
  #isDeleted = false;
  #storedKey; // the key of the stored stream
  #firstSecret; // the secret at the beginning of the stream
  #shownSecrets = ""; // the secrets in the `open` of this connection
  #refusal = null; // {error, shown}: the secrets that the server refused
  #patienceMs;
  #stallAfterMs;
  #connectionNumber; // the number of the newest connection
  #stallAt = Infinity;
  #isHeartbeatFresh = false; // a heartbeat was received since the last event
  #isHeartbeatRequested = false; // a heartbeat was requested, as the turn may have stalled
  #reachWithinMs;
  #reachBy; // the limit for the first welcome; Infinity after it
  #lastFailure = ""; // why the last connection failed

  /**
   * @param stored The earlier result of `record`, with the `secret` and the unacknowledged `commands`; or
   *   `{session, key, cursor}` of a new stream, whose secret comes by `showSecrets`. Events begin after `cursor`, by default
   *   with the stream's first event. Without `key` the stream only reads. With `damage` its commands are lost: it delivers a
   *   snapshot of the session, and the rest of the running turn.
   * @param limits Time limits: `patienceMs`, `stallAfterMs`, `reachWithinMs`.
   */
  constructor(stored, now = 0, limits = {}) {
    const { patienceMs = PATIENCE_MS, stallAfterMs = STALL_AFTER_MS, reachWithinMs = Infinity } = limits;
    this.session = stored.session;
    this.damage = stored.damage ?? "";
    this.#storedKey = stored.key ?? "";
    this.key = this.damage ? "" : this.#storedKey;
    this.secret = stored.secret ?? "";
    this.oldSecret = "";
    this.#firstSecret = this.key ? this.secret : "";
    this.turn = stored.turn ?? 0;
    this.acked = stored.acked ?? 0;
    this.nextSeqno = stored.nextSeqno ?? 0;
    this.cancelAfterS = stored.cancelAfterS ?? null;
    this.life = stored.life === undefined ? 0 : stored.life + 1;
    this.isWhole = stored.isWhole ?? (!this.key || (stored.cursor ?? null) !== null);
    this.phase = "waiting";
    this.deadlineAt = now;
    this.error = null;
    this.trouble = null;
    this.isDegraded = false;
    this.isReconnecting = false;
    this.isStalled = false;
    this.isAbandoned = stored.isDetached ?? false;
    this.isEncrypted = null; // unknown before the first welcome
    this.waitingOn = "";
    this.frameBytesMax = 1024 * 1024;
    this.#lostAt = now;
    this.#patienceMs = patienceMs;
    this.#stallAfterMs = stallAfterMs;
    this.#connectionNumber = this.life * CONNECTIONS_PER_LIFE;
    this.#isBegun = this.isWhole || (stored.cursor ?? null) !== null;
    this.#isReached = this.life > 0;
    this.#reachWithinMs = this.#isReached ? Infinity : reachWithinMs;
    this.#reachBy = now + this.#reachWithinMs;
    this.#moveTo(this.damage ? null : (stored.cursor ?? null));
    this.#promised = this.key && stored.promised ? parseEventId(stored.promised) : null;
    this.#newestEpoch = (this.key && stored.known) || null;
    this.#commands = this.damage ? [] : [...(stored.commands ?? [])].sort((a, b) => a.seqno - b.seqno);
    this.#abortSeqno = this.#commands.find(({ frame }) => parseFrame(frame)?.payload?.type === "cancel")?.seqno ?? null;
    if (this.damage) this.#emit({ type: "lost", id: "0-0", reason: this.damage });
    // STREAM-50: connection numbers are above those of the earlier page, so `life` is stored before the first connection.
    else if (stored.life !== undefined) this.#write({ op: "stream", value: this.record() });
  }

  /** The last applied event, or null if the stream has not begun. */
  get cursor() {
    return formatEventId(this.#at);
  }

  get isConnectionWanted() {
    return this.phase === "connecting" || this.phase === "opening" || this.phase === "live";
  }

  /** The time for the next call of `tick`; Infinity if there is no deadline. */
  get dueAt() {
    return Math.min(this.deadlineAt, this.#stallAt, this.#reachBy);
  }

  /** Whether every command is in the server's journal. */
  get isAcknowledged() {
    return this.#commands.length === 0;
  }

  /** Whether it ended with its turn, and was not abandoned. */
  get isOver() {
    return this.#isOver && this.key !== "" && !this.isAbandoned;
  }

  /** Whether its message waits for the turns before it. */
  get isQueued() {
    return this.#isQueued;
  }

  /** Whether it is in the storage. */
  get isStored() {
    return this.key !== "" && !this.isDegraded && !this.#isDeleted;
  }

  /** The text of the unacknowledged message, or null. */
  get pendingText() {
    for (const { frame } of this.#commands) {
      const { payload } = JSON.parse(frame);
      if (payload.type === "send") return payload.parts.map((part) => part.text ?? "").join("");
    }
    return null;
  }

  /** Return the state to store, from which the stream can be resumed. Its secret and its commands are stored separately. */
  record() {
    const { session, key, cursor, turn, acked, nextSeqno } = this;
    const { isAbandoned: isDetached, isWhole, life, cancelAfterS } = this;
    const state = { session, key, cursor, turn, acked, nextSeqno, isDetached, isWhole, life, cancelAfterS };
    return { ...state, promised: formatEventId(this.#promised), known: this.#newestEpoch };
  }

  // --- commands of the application ---

  /** Number a user's message. Throws, and changes nothing, if it is too large for a frame or has a lone surrogate. */
  send(text, now, whenBusy = "queue") {
    if (typeof text !== "string") throw new MidstreamError("usage", `the message is a ${typeof text}; expected a string. Nothing was sent`);
    const payload = { type: "send", parts: [{ type: "text", text }] };
    this.#submit(whenBusy === "queue" ? payload : { ...payload, when_busy: whenBusy });
  }

  /** Number a person's answer to an open question. */
  answer(answer, now) {
    this.#submit({ type: "answer", ...answer });
  }

  /** Number a request to resume the last turn, or only `turn`. It becomes the turn of this stream. */
  resume(turn, now) {
    this.#submit(turn ? { type: "resume", turn } : { type: "resume" });
  }

  /** Number a request to withdraw a queued message, or all of them. */
  withdraw(number, now) {
    this.#submit(number ? { type: "withdraw", number } : { type: "withdraw" });
  }

  /** Number a request to cancel `turn`, or the turn that runs, and connect for it. A second call is harmless. */
  abort(turn, now) {
    if (this.#abortSeqno !== null || this.phase === "ended") return;
    this.#submit(turn ? { type: "cancel", turn } : { type: "cancel" });
    this.#abortSeqno = this.nextSeqno - 1;
    if (this.phase === "waiting") this.wake(now);
  }

  /**
   * Send this secret of the session from now on; "" changes nothing. The first secret of the stream is sent beside it if it
   * differs: the session's secret was changed, or the stream had a secret of its own. If the server has refused the same
   * secrets before, the stream ends (STREAM-96).
   */
  showSecrets({ secret, oldSecret = "" }, now) {
    if (secret) this.#setSecrets(secret, oldSecret);
    const refusal = this.#refusal;
    this.#refusal = null;
    if (refusal?.shown === this.#secrets) this.#end(refusal.error);
  }

  get #secrets() {
    return `${this.secret} ${this.oldSecret}`;
  }

  #setSecrets(secret, oldSecret) {
    if (this.key && !this.#firstSecret) {
      this.#firstSecret = secret;
      if (this.nextSeqno > 0) this.#write({ op: "secret", value: { key: this.key, secret } });
    }
    this.secret = secret;
    this.oldSecret = oldSecret || (this.#firstSecret === secret ? "" : this.#firstSecret);
  }

  /** Deliver no more events. The stream continues until its commands are acknowledged, and is deleted then. */
  abandon(now) {
    this.isAbandoned = true;
    this.#events = [];
    if (this.phase === "ended") this.markHandled();
    else if (this.isAcknowledged) this.#end(null);
    else this.#write({ op: "stream", value: this.record() });
  }

  /** End at once and keep the stored state, so that another page can resume the stream. */
  detach() {
    if (this.phase === "live") this.#frames.push(CLOSE_FRAME);
    this.#stop();
  }

  /** Delete the stored state, as the application has handled all events of a stream that ended (STREAM-26). */
  markHandled() {
    if (this.#isOver) this.#delete();
  }

  // --- connections and time ---

  /** Begin with an open connection. */
  beginConnection(now) {
    if (this.phase !== "connecting") return;
    this.phase = "opening";
    this.#shownSecrets = this.#secrets;
    this.#sent = this.acked;
    this.#connectionNumber += 1;
    this.#frames.push(JSON.stringify(this.#openFrame()));
    this.#sendCommands();
    this.noteTraffic(now);
  }

  #openFrame() {
    const { key: stream, secret, oldSecret: old_secret, isWhole, cancelAfterS } = this;
    const event_id = this.#isBegun ? this.cursor : null;
    const open = { type: "open", version: PROTOCOL_VERSION, event_id };
    open.snapshots = this.damage ? "begin" : "gone";
    if (secret) open.secret = secret;
    if (old_secret) open.old_secret = old_secret;
    if (!stream) return open;
    // STREAM-6: the server may not have the stream before its first command is acknowledged. With the event id of the
    // session and a number above 0, it would refuse the unknown stream.
    const next_seqno = isWhole && event_id !== null && this.acked === 0 ? 0 : this.nextSeqno;
    const identity = { stream, next_seqno, connection: this.#connectionNumber };
    return { ...open, ...identity, ...(cancelAfterS === null ? {} : { cancel_after_s: cancelAfterS }) };
  }

  /** Plan the next connection, as the connection was lost or not made. The next try is not before `notBefore`. */
  endConnection(chance, now, { notBefore = 0, error = null } = {}) {
    if (this.phase === "ended" || this.phase === "waiting") return this.#delayUntil(notBefore);
    this.#frames = [];
    this.#isPinged = false;
    this.#restartSilence(Infinity);
    if (this.isDegraded) {
      const message = "the connection was lost, and the server cannot resume the stream";
      return this.#end(error ?? new MidstreamError("connection_lost", message, "later"));
    }
    if (error?.code === WRONG_SECRET) this.#refusal = { error, shown: this.#shownSecrets };
    else if (error !== null && FINAL_RETRIES.has(error.retry) && !this.#isTemporary(error)) return this.#end(error);
    if (error !== null && error.code !== "connection_lost") this.trouble = error;
    this.#lastFailure = error?.message ?? this.#lastFailure;
    if (this.#failures === 0) this.#lostAt = now;
    this.#failures += 1;
    const isStopped = this.#abortSeqno !== null && this.#abortSeqno < this.acked;
    const patienceMs = isStopped ? Math.min(STOPPED_PATIENCE_MS, this.#patienceMs) : this.#patienceMs;
    if (this.#failures > 1 && now - this.#lostAt >= patienceMs) {
      const message = `no working connection for ${patienceMs / 1000} s`;
      return this.#end(new MidstreamError("connection_lost", message, "later"));
    }
    this.phase = "waiting";
    this.isReconnecting = true;
    this.#delayAsRequested(error, now);
    // The first try is immediate, as most cuts are short. The last one is at the end of the patience.
    const pauseMs = backoffMs(this.#failures - 1, chance, now - this.#lostAt);
    this.deadlineAt = Math.min(now + pauseMs, this.#lostAt + patienceMs);
    return this.#delayUntil(notBefore);
  }

  /** Return whether a refusal comes from something between client and server, and may end (STREAM-107). */
  #isTemporary(error) {
    return this.#isReached && error.isForeign === true && error.code !== "access";
  }

  #delayAsRequested(error, now) {
    const requestedMs = Math.min(1000 * (error?.retryAfterS ?? 0), RETRY_AFTER_MAX_MS);
    this.#notBefore = Math.max(this.#notBefore, now + requestedMs);
  }

  #delayUntil(notBefore) {
    this.#notBefore = Math.max(this.#notBefore, notBefore);
    if (this.phase === "waiting") this.deadlineAt = Math.max(this.deadlineAt, this.#notBefore);
  }

  /** Connect now, or test the open connection with a ping: the network may be back, or the page is visible. */
  wake(now) {
    if (this.phase === "waiting") {
      const soonest = Math.max(now, this.#notBefore, this.#wokenAt + WAKE_EVERY_MS);
      if (soonest < this.deadlineAt) this.#wokenAt = this.deadlineAt = soonest;
    } else if (this.phase === "live" && !this.#isPinged) {
      this.#isPinged = true;
      this.#frames.push(PING_FRAME);
      this.deadlineAt = Math.min(this.deadlineAt, now + PING_WITHIN_MS);
    }
  }

  /**
   * Do what is due; return whether the connection must end (then call `endConnection`).
   *
   * `isLate`: this page did not run for a while (asleep, frozen, in the background). Received frames may still be in a
   * queue, so a ping is sent before the silence counts.
   */
  tick(now, isLate = false) {
    if (now >= this.#reachBy) {
      if (!isLate) return this.#endUnreached();
      this.#reachBy = now + this.#reachWithinMs; // no connection was tried meanwhile
    }
    if (isLate && this.phase === "live" && !this.#isPinged) {
      this.#restartSilence(now);
      this.deadlineAt = Infinity;
      this.wake(now);
      return false;
    }
    if (now >= this.#stallAt) {
      // STREAM-47: a stall is reported, and causes nothing else. Only heartbeats have what the turn waits for.
      if (this.#isHeartbeatFresh) this.#judgeSilence(now);
      else {
        this.#isHeartbeatRequested = true;
        this.#stallAt = Infinity;
        this.#frames.push(PING_FRAME);
      }
    }
    if (now < this.deadlineAt) return false;
    if (this.phase === "waiting") {
      this.phase = "connecting";
      this.deadlineAt = now + CONNECT_WITHIN_MS;
      return false;
    }
    return this.isConnectionWanted;
  }

  /** Decide whether the silence is a stall. A turn that waits for a person is checked again later. */
  #judgeSilence(now) {
    this.isStalled = MACHINES.has(this.waitingOn);
    this.#stallAt = this.isStalled ? Infinity : now + this.#stallAfterMs;
  }

  /** Restart the count of the server's silence, as a frame or a part of one was received (STREAM-46). */
  noteTraffic(now) {
    if (this.phase !== "opening" && this.phase !== "live") return;
    this.#isPinged = false;
    this.deadlineAt = now + this.#silenceMs;
  }

  /** Take one received frame; return whether the connection must end (then call `endConnection`). */
  receive(text, now) {
    if (this.phase !== "opening" && this.phase !== "live") return false;
    const before = this.phase === "live" ? this.cursor : "";
    try {
      const frame = JSON.parse(text);
      const outcome = this.#takeFrame(frame, now);
      if (this.phase === "live" && before !== this.cursor && !isSilence(frame)) this.#restartSilence(now);
      this.noteTraffic(now);
      return outcome === "reconnect";
    } catch (error) {
      if (error instanceof SyntaxError || error instanceof TypeError || error instanceof MidstreamError)
        return true;
      throw error;
    }
  }

  /** Return what is due, in this order: writes (await them), frames, events. */
  take() {
    const taken = { writes: this.#writes, frames: this.#frames, events: this.#events };
    this.#writes = [];
    this.#frames = [];
    this.#events = [];
    return taken;
  }

  // --- frames ---

  #takeFrame(frame, now) {
    if (frame.type === "error") return this.#takeError(frame, now);
    if (this.phase === "opening" && frame.type !== "welcome") return FRAME_TYPES.has(frame.type) ? "reconnect" : undefined;
    switch (frame.type) {
      case "welcome":
        return this.phase === "live" ? "reconnect" : this.#takeWelcome(frame, now);
      case "ack":
        return frame.is_single ? this.#acknowledgeOne(frame.seqno) : this.#acknowledge(frame.seqno + 1);
      case "events":
        return this.#takeEvents(frame.events);
      case "gone":
        return this.#takeGone(frame);
      case "snapshot":
        return this.#takeSnapshot(frame);
      case "heartbeat":
        return this.#takeHeartbeat(frame, now);
      default:
        return undefined; // a frame of a newer server
    }
  }

  #takeWelcome(frame, now) {
    const from = parseEventId(frame.resume_from);
    const acked = frame.acked ?? 0;
    this.phase = "live";
    this.#isReached = true;
    this.#reachBy = Infinity;
    this.isReconnecting = false;
    this.isDegraded = frame.is_degraded ?? false;
    this.isEncrypted = frame.is_encrypted ?? false;
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
    this.#isQueued = this.key !== "" && acked > 0 && !this.turn && !this.isAbandoned;
    this.#isGoneDue = !this.#isBegun || frame.resume_from !== this.cursor;
    if (!this.#isBegun || this.#at === null) this.#at = from;
    this.#isSnapshotDue = false;
    this.#restartSilence(now);
    if (this.isDegraded && this.key) this.#writes.push({ op: "delete", key: this.key });
    if (this.key && acked > this.nextSeqno) {
      // The stored state is older than the sent commands. It would use their numbers again (STREAM-11).
      const message = `the server has ${acked} commands of this stream; ${this.nextSeqno} were numbered here`;
      return this.#end(new MidstreamError("seqno_reused", message));
    }
    const newest = parseEventId(frame.event_id);
    if (hasLostPromised(this.#promised, newest, this.key !== "")) return this.#endWithLoss(`ends with ${formatEventId(newest)}`);
    if (this.#isSetBack(from.epoch, frame.began_at ?? null)) return this.#endSetBack(from.epoch);
    if (this.key && acked < this.acked) {
      // Acknowledged commands are deleted here, so they cannot be played back.
      const message = `the server has ${acked} commands of this stream; it had acknowledged ${this.acked}`;
      return this.#end(new MidstreamError("stream_not_found", message));
    }
    this.#turnEnd = ENDED_STATUSES.has(frame.turn_status) ? parseEventId(frame.event_id) : null;
    return this.key ? this.#acknowledge(acked) : undefined;
  }

  #takeGone(frame) {
    this.#moveTo(frame.resume_from);
    this.#isBegun = this.isWhole;
    this.#announced = null;
    this.#isGoneDue = false;
    this.#isSnapshotDue = frame.has_snapshot ?? false;
    const { resume_from: id, reason, has_snapshot: hasSnapshot = false } = frame;
    this.#emit({ type: "gone", id, reason, hasSnapshot });
    this.#write({ op: "stream", value: this.record() });
    return this.#endIfDone();
  }

  /** Continue after a snapshot, which replaces all events up to it. */
  #takeSnapshot(frame) {
    this.#moveTo(frame.event_id);
    this.#isBegun = true;
    this.#isGoneDue = this.#isSnapshotDue = false;
    if (this.key && frame.turn) {
      this.turn = frame.turn;
      this.#isQueued = false;
    }
    this.#announced = null;
    this.#noteProgress();
    const { event_id: id, session, turn = null } = frame;
    this.#emit({ type: "snapshot", id, session, turn });
    this.#write({ op: "stream", value: this.record() });
    if (this.damage) return !OPEN_STATUSES.has(frame.session?.status) ? this.#end(null) : undefined;
    return this.key && frame.is_over ? this.#end(null) : this.#endIfDone();
  }

  /** Take an ack of all commands below `accepted`. */
  #acknowledge(accepted) {
    if (!(accepted <= this.nextSeqno)) return "reconnect"; // an ack of a command that was never sent
    if (accepted > this.acked || this.#commands.some((command) => command.seqno < accepted)) {
      this.acked = Math.max(this.acked, accepted);
      this.#commands = this.#commands.filter((command) => command.seqno >= accepted);
      this.#sent = Math.max(this.#sent, accepted);
      this.#unanswered = 0;
      this.#noteProgress();
      this.#write({ op: "acked", key: this.key, accepted }, { op: "stream", value: this.record() });
    }
    this.#sendCommands();
    return this.#endIfDone();
  }

  /** Take an ack of one command only. The command stays until all commands before it are acknowledged (STREAM-53). */
  #acknowledgeOne(seqno) {
    if (!(seqno >= 0 && seqno < this.nextSeqno)) return "reconnect";
    if (seqno > this.acked) this.#ackedSingly.add(seqno);
    if (seqno !== this.acked) return undefined;
    let accepted = seqno + 1;
    while (this.#ackedSingly.delete(accepted)) accepted += 1;
    return this.#acknowledge(accepted);
  }

  /** Send the commands that this connection has not sent: new ones, and the unacknowledged ones of earlier connections. */
  #sendCommands() {
    if (this.phase !== "opening" && this.phase !== "live") return;
    const room = this.acked + this.#ackedSingly.size + this.#inFlightMax;
    for (const { seqno, frame, isFiller } of this.#commands) {
      if (seqno < this.#sent || seqno >= room) continue;
      if (isFiller && this.phase === "opening") return; // the server may have the lost command
      if (!this.#ackedSingly.has(seqno)) this.#frames.push(frame);
      this.#sent = seqno + 1;
    }
  }

  #takeEvents(events) {
    for (const { id, record } of events) {
      if (this.phase === "ended") return undefined;
      const at = parseEventId(id);
      if (at.position <= this.#at.position && at.epoch <= this.#at.epoch) continue; // applied before
      if (at.position !== this.#at.position + 1 || at.epoch < this.#at.epoch) return "reconnect"; // a gap
      const began = record.type === "epoch_started" ? (record.at ?? null) : null;
      if (this.#isSetBack(at.epoch, began)) return this.#endSetBack(at.epoch);
      if (isReplaced(this.#promised, at, this.key !== "")) return this.#endWithLoss(`has ${id} in its place`);
      if (isDurable(record) && !(this.key && at.position <= this.#promised?.position)) this.#promised = at;
      this.#at = at;
      this.#isGoneDue = false;
      this.#noteProgress();
      if (this.#takeRecord(id, record) === "reconnect") return "reconnect";
    }
    return this.#endIfDone();
  }

  #takeRecord(id, record) {
    const isOwn = this.key !== "" && record.stream === this.key;
    if (isOwn) this.#isBegun = true; // the first record of a stream is `stream_opened`
    if (!this.#isBegun) return undefined;
    if (isOwn && record.type === "message_queued") this.#isQueued = true;
    if (isOwn && record.type === "message_accepted") this.#isQueued = false;
    if (isOwn || this.isWhole || !this.#isQueued) this.#emit({ type: "record", id, record });
    if (this.damage && record.type === "turn_ended") return this.#end(null);
    if (!this.key) return undefined;
    if (isOwn && (record.type === "message_accepted" || record.type === "turn_resumed")) this.turn = record.turn;
    if (isOwn && record.type === "command_accepted") return this.#acknowledge(record.seqno + 1);
    const isTaken = isOwn && record.type === "message_withdrawn";
    const isEnd = this.turn > 0 && record.type === "turn_ended" && record.turn === this.turn;
    return isTaken || isEnd ? this.#end(null) : undefined;
  }

  /** End if the turn had ended by the welcome, and all its events and acks were received. */
  #endIfDone() {
    if (!this.key || !this.isAcknowledged || this.phase !== "live" || this.nextSeqno === 0) return undefined;
    if (this.#isGoneDue || this.#isSnapshotDue) return undefined;
    const isOver = this.#turnEnd !== null && this.#at.position >= this.#turnEnd.position;
    return this.isAbandoned || isOver ? this.#end(null) : undefined;
  }

  #takeHeartbeat(frame, now) {
    const newest = parseEventId(frame.event_id).position;
    this.waitingOn = frame.waiting_on ?? "";
    this.#isHeartbeatFresh = true;
    if (this.#isHeartbeatRequested) this.#judgeSilence(now);
    this.#isHeartbeatRequested = false;
    if (this.#announced !== null && this.#at.position < this.#announced) return "reconnect";
    this.#announced = newest;
    if (this.#sent > this.acked + this.#ackedSingly.size) this.#unanswered += 1;
    if (this.#unanswered >= HEARTBEATS_MISSED_MAX) return "reconnect"; // STREAM-14
    this.#failures = 0;
    return undefined;
  }

  #takeError(frame, now) {
    const error = new MidstreamError(frame.code, frame.message, frame.retry, frame.retry_after_s ?? null);
    const isPlaybackPossible =
      frame.code === "seqno_gap" && this.#commands.some((command) => command.seqno === frame.expected);
    const isFinal = error.code === BUSY || FINAL_RETRIES.has(error.retry);
    if (!this.isDegraded && error.code === WRONG_SECRET) {
      this.#refusal = { error, shown: this.#shownSecrets };
      return "reconnect";
    }
    if (this.isDegraded || (isFinal && !isPlaybackPossible)) return this.#end(error);
    this.trouble = error;
    this.#delayAsRequested(error, now);
    return "reconnect";
  }

  #submit(payload) {
    if (this.phase === "ended") throw this.error ?? new MidstreamError("usage", "the stream has ended. Nothing was sent");
    refuseBrokenText(payload);
    if (this.nextSeqno >= COMMANDS_MAX) throw new MidstreamError("usage", `the stream has ${COMMANDS_MAX} commands, the maximum. Nothing was sent`);
    const seqno = this.nextSeqno;
    const frame = `{"type":"command","seqno":${seqno},"payload":${JSON.stringify(payload)}}`;
    const bytes = new TextEncoder().encode(frame).length;
    if (bytes > this.frameBytesMax) {
      const message = `the message needs ${bytes} bytes; a frame has at most ${this.frameBytesMax}. Nothing was sent`;
      throw new MidstreamError("frame_too_large", message);
    }
    this.nextSeqno += 1;
    this.#commands.push({ seqno, frame });
    if (seqno === 0 && this.secret) this.#write({ op: "secret", value: { key: this.key, secret: this.secret } });
    this.#write({ op: "command", value: { key: this.key, seqno, frame } }, { op: "stream", value: this.record() });
    this.#sendCommands();
  }

  #emit(event) {
    if (!this.isAbandoned) this.#events.push(event);
  }

  /** End the count of failures, as an event or an ack was received. */
  #noteProgress() {
    this.#failures = 0;
    this.trouble = null;
  }

  /** Restart the count of the turn's silence at `now`; Infinity stops it. */
  #restartSilence(now) {
    this.isStalled = this.#isHeartbeatFresh = this.#isHeartbeatRequested = false;
    this.#stallAt = this.key && this.phase === "live" ? now + this.#stallAfterMs : Infinity;
  }

  #write(...writes) {
    if (this.isStored && this.phase !== "ended") this.#writes.push(...writes);
  }

  #moveTo(cursor) {
    this.#at = cursor === null ? null : parseEventId(cursor);
  }

  #delete() {
    if (this.#storedKey && !this.#isDeleted) this.#writes.push({ op: "delete", key: this.#storedKey });
    this.#isDeleted = true;
  }

  #end(error) {
    if (this.phase === "ended") return;
    if (this.phase === "live" && error === null) this.#frames.push(CLOSE_FRAME);
    this.error = error;
    this.#stop();
    this.#isOver = error === null;
    if (error === null ? this.isAbandoned : !RESUMABLE_CODES.has(error.code)) this.#delete();
  }

  /** Take the beginning of an epoch; return whether it differs from an earlier report. */
  #isSetBack(epoch, beganAt) {
    if (hasOtherBeginning(this.#newestEpoch, this.#promised, epoch, beganAt)) return true;
    this.#newestEpoch = newestEpochAfter(this.#newestEpoch, this.#promised, epoch, beganAt);
    return false;
  }

  #endSetBack(epoch) {
    return this.#endWithLoss(`began epoch ${epoch} another time since`);
  }

  #endWithLoss(what) {
    const message = `the server had ${formatEventId(this.#promised)} on its disk, and ${what}`;
    return this.#end(new MidstreamError("events_lost", `${message}. Its journal was cut, or replaced by an older copy`));
  }

  #endUnreached() {
    const why = this.#lastFailure && ` (last: ${this.#lastFailure})`;
    const advice = "check its address and scheme, and that it allows this page's origin (midstream serve --allow-origin)";
    const message = `no connection to the server within ${this.#reachWithinMs / 1000} s${why}: ${advice}`;
    return this.#end(new MidstreamError("connection_lost", message, "later"));
  }

  #stop() {
    this.phase = "ended";
    this.deadlineAt = this.#stallAt = this.#reachBy = Infinity;
    this.isReconnecting = this.isStalled = false;
    this.trouble = null;
  }
}

/** Return whether a frame only reports silence (STREAM-47). */
function isSilence({ type, events }) {
  return type === "events" && events.every(({ record }) => record.type === "stall_noticed");
}

/** The types of frames after a welcome. */
const FRAME_TYPES = new Set(["ack", "events", "gone", "snapshot", "heartbeat"]);

function formatEventId(at) {
  return at && `${at.epoch}-${at.position}`;
}

function parseFrame(frame) {
  try {
    return JSON.parse(frame);
  } catch {
    return null;
  }
}
