/**
 * The client's half of the stream protocol, without I/O: no socket, no clock, no storage.
 *
 * A command is stored before it is sent. An event is applied by its id before it is delivered. Commands are in
 * `command_outbox.js`, events in `event_inbox.js`, connections in `link.js`; this module joins them.
 */

import { Outbox } from "./command_outbox.js";
import { EVENTS_LOST, FINAL_RETRIES, KEEPS_CHECKPOINT, MidstreamError, SESSION_BUSY, connectionLostError, protocolError } from "./errors.js";
import { Inbox, isSilence } from "./event_inbox.js";
import { CLOSE_FRAME, HEARTBEAT_S, IN_FLIGHT_MAX, OPEN_STATUSES, PING_FRAME, PROTOCOL_VERSION, SERVER_FRAMES } from "./frames.js";
import { Link } from "./link.js";
import { SentSecrets } from "./sent_secrets.js";
import { TurnSilence } from "./turn_silence.js";

/**
 * The client's half of one stream, without I/O.
 *
 * Times are milliseconds of a monotonic clock; `now` is the last required argument. After every call: do what `take()`
 * returns in its order (writes, then frames, then events), have a connection exactly while `isConnectionWanted`, and call
 * `tick` at `dueAt`. Early and repeated calls are harmless. No frame of the server makes a method throw.
 */
export class Stream {
  error = null; // why it ended
  isDegraded = false;
  isEncrypted = null; // unknown before the first welcome
  #storedKey; // the key of the stored stream; "" when it is deleted
  #outbox;
  #inbox;
  #link;
  #silence;
  #secrets;
  #writes = [];
  #frames = [];
  #events = [];
  #isOver = false; // it ended without an error; the application may still have events to handle

  /**
   * @param stored The earlier result of `record`, with the `secret` and the unacknowledged `commands`; or
   *   `{session, key, cursor}` of a new stream, whose secret comes by `showSecrets`. Events begin after `cursor`, by default
   *   with the stream's first event. Without `key` the stream only reads. With `damage` its commands are lost: it delivers a
   *   snapshot of the session, and the rest of the running turn.
   * @param limits Time limits: `patienceMs`, `stallAfterMs`, `reachWithinMs`; and `isReached`, whether the client received a
   *   welcome of this server before.
   */
  constructor(stored, now = 0, limits = {}) {
    this.session = stored.session;
    this.damage = stored.damage ?? "";
    this.#storedKey = stored.key ?? "";
    this.key = this.damage ? "" : this.#storedKey;
    this.cancelAfterS = stored.cancelAfterS ?? null;
    this.life = stored.life === undefined ? 0 : stored.life + 1;
    this.isAbandoned = stored.isDetached ?? false;
    const begun = this.damage ? { ...stored, cursor: null, commands: [] } : stored;
    this.#outbox = new Outbox(begun);
    this.#inbox = new Inbox(this.key, begun);
    this.#link = new Link(this.life, limits, now);
    this.#silence = new TurnSilence(limits.stallAfterMs);
    this.#secrets = new SentSecrets(stored.secret ?? "", this.key !== "");
    if (this.damage) this.#emit({ type: "lost", id: "0-0", reason: this.damage });
    // STREAM-50: connection numbers are above those of the earlier page, so `life` is stored before the first connection.
    else if (stored.life !== undefined) this.#write({ op: "stream", value: this.record() });
  }

  get phase() { return this.#link.phase; }
  get isConnectionWanted() { return this.#link.isWanted; }
  get isReconnecting() { return this.#link.isReconnecting; }
  get trouble() { return this.#link.trouble; }
  get deadlineAt() { return this.#link.deadlineAt; }
  get isStalled() { return this.#silence.isStalled; }
  get waitingOn() { return this.#silence.waitingOn; }
  get secret() { return this.#secrets.secret; }
  get cursor() { return this.#inbox.cursor; }
  get turn() { return this.#inbox.turn; }
  get isQueued() { return this.#inbox.isQueued; }
  get acked() { return this.#outbox.acked; }
  get nextSeqno() { return this.#outbox.nextSeqno; }
  get isAcknowledged() { return this.#outbox.isAcknowledged; }
  get pendingText() { return this.#outbox.pendingText; }

  /** The time for the next call of `tick`; Infinity if there is no deadline. */
  get dueAt() { return Math.min(this.#link.dueAt, this.#silence.dueAt); }

  /** Whether it ended with its turn, and was not abandoned. */
  get isOver() { return this.#isOver && this.key !== "" && !this.isAbandoned; }

  /** Whether it is in the storage. */
  get isStored() { return this.key !== "" && this.#storedKey !== ""; }

  /** Return the state to store, from which the stream can be resumed. Its secret and its commands are stored separately. */
  record() {
    const { session, key, acked, nextSeqno, isAbandoned: isDetached, life, cancelAfterS } = this;
    return { session, key, acked, nextSeqno, isDetached, life, cancelAfterS, ...this.#inbox.record() };
  }

  // --- commands of the application ---

  /** Number a user's message. Throws, and changes nothing, if it is too large for a frame or has a lone surrogate. */
  send(text, now, whenBusy = "queue") {
    if (typeof text !== "string") throw new MidstreamError("usage", `the message is a ${typeof text}; expected a string. Nothing was sent`);
    this.#submit({ type: "send", parts: [{ type: "text", text }], ...(whenBusy === "queue" ? {} : { when_busy: whenBusy }) });
  }

  /** Number a person's answer to an open question. */
  answer(answer, now) { this.#submit({ type: "answer", ...answer }); }

  /** Number a request to resume the last turn, or only `turn`. It becomes the turn of this stream. */
  resume(turn, now) { this.#submit(turn ? { type: "resume", turn } : { type: "resume" }); }

  /** Number a request to withdraw a queued message, or all of them. */
  withdraw(number, now) { this.#submit(number ? { type: "withdraw", number } : { type: "withdraw" }); }

  /** Number a request to cancel `turn`, or the turn that runs, and connect for it. A second call is harmless. */
  abort(turn, now) {
    if (this.#outbox.cancelSeqno !== null || this.phase === "ended") return;
    this.#outbox.cancelSeqno = this.#submit(turn ? { type: "cancel", turn } : { type: "cancel" });
    if (this.phase === "waiting") this.wake(now);
  }

  /** Send this secret of the session from now on; "" changes nothing. End if the server has refused the same secrets before. */
  showSecrets({ secret, oldSecret = "" }, now) {
    if (secret && !this.secret && this.nextSeqno > 0) this.#write({ op: "secret", value: { key: this.key, secret } });
    const refusal = this.#secrets.show(secret, oldSecret);
    if (refusal !== null) this.#end(refusal);
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
  markHandled() { if (this.#isOver) this.#delete(); }

  // --- connections and time ---

  /** Begin with an open connection. */
  beginConnection(now) {
    if (this.phase !== "connecting") return;
    this.#link.open(now);
    this.#secrets.noteOpen();
    this.#outbox.playBack();
    this.#frames.push(JSON.stringify(this.#openFrame()));
    this.#sendCommands();
  }

  #openFrame() {
    const { secret, oldSecret: old_secret } = this.#secrets;
    const event_id = this.#inbox.isBegun ? this.cursor : null;
    const open = { type: "open", version: PROTOCOL_VERSION, event_id, snapshots: this.damage ? "begin" : "gone" };
    if (secret) open.secret = secret;
    if (old_secret) open.old_secret = old_secret;
    if (!this.key) return open;
    // STREAM-6: the server may not have the stream before its first command is acknowledged. With the event id of the
    // session and a number above 0, it would refuse the unknown stream.
    const next_seqno = this.#inbox.isWhole && event_id !== null && this.acked === 0 ? 0 : this.nextSeqno;
    const identity = { stream: this.key, next_seqno, connection: this.#link.number };
    return { ...open, ...identity, ...(this.cancelAfterS === null ? {} : { cancel_after_s: this.cancelAfterS }) };
  }

  /** Plan the next connection, as the connection was lost or not made. The next try is not before `notBefore`. */
  endConnection(chance, now, { notBefore = 0, error = null } = {}) {
    if (this.phase === "ended" || this.phase === "waiting") return this.#link.delayUntil(notBefore);
    this.#frames = [];
    this.#silence.begin(Infinity);
    if (this.isDegraded) return this.#end(error ?? connectionLostError("the connection was lost, and the server cannot resume the stream"));
    if (!this.#secrets.noteRefusal(error) && this.#link.isFinal(error)) return this.#end(error);
    const ended = this.#link.lose(error, this.#outbox.isCancelAcked, chance, now);
    return ended === null ? this.#link.delayUntil(notBefore) : this.#end(ended);
  }

  /** Connect now, or send a ping: the network may be back, or the page is visible. Return whether a ping is sent. */
  wake(now, isLate = false) {
    const isPing = this.#link.wake(now, isLate);
    if (isPing) this.#frames.push(PING_FRAME);
    return isPing;
  }

  /**
   * Do what is due; return whether the connection must end (then call `endConnection`).
   *
   * `isLate`: this page did not run for a while (asleep, frozen, in the background). Received frames may still be in a
   * queue, so a ping is sent before the silence counts.
   */
  tick(now, isLate = false) {
    const unreached = this.#link.judgeReach(now, isLate);
    if (unreached !== null) this.#end(unreached);
    if (isLate && this.phase === "live" && this.wake(now, isLate)) {
      this.#restartSilence(now);
      return false;
    }
    if (this.#silence.judge(now)) this.#frames.push(PING_FRAME);
    return this.#link.handleDeadline(now);
  }

  /** Restart the count of the server's silence, as a frame or a part of one was received (STREAM-46). */
  noteTraffic(now) { this.#link.noteTraffic(now); }

  /** Take one received frame; return whether the connection must end (then call `endConnection`). */
  receive(text, now) {
    if (!this.#link.isOpen) return false;
    const { phase, cursor } = this;
    try {
      const frame = JSON.parse(text);
      if (frame.type === "error") return this.#takeError(frame, now);
      this.#takeFrame(frame, now);
      if ((phase !== this.phase || cursor !== this.cursor) && !isSilence(frame)) this.#restartSilence(now);
      this.noteTraffic(now);
    } catch (error) {
      if (error.code === EVENTS_LOST) this.#end(error);
      else if (error instanceof SyntaxError || error instanceof TypeError || error instanceof MidstreamError) return true;
      else throw error;
    }
    return false;
  }

  /** Return what is due, in this order: writes (await them), frames, events. */
  take() {
    const taken = { writes: this.#writes, frames: this.#frames, events: this.#events };
    [this.#writes, this.#frames, this.#events] = [[], [], []];
    return taken;
  }

  // --- frames. A method throws if the server breaks a rule: then the connection ends, and the next one resumes. ---

  #takeFrame(frame, now) {
    if (!SERVER_FRAMES.has(frame.type)) return; // a frame of a newer server
    if ((frame.type === "welcome") !== (this.phase === "opening")) throw protocolError("a welcome comes first, and once");
    switch (frame.type) {
      case "welcome":
        return this.#takeWelcome(frame);
      case "ack":
        return this.#takeAck(frame.seqno, frame.is_single);
      case "events":
        return this.#takeEvents(frame.events);
      case "gone":
        return this.#move(this.#inbox.goBack(frame));
      case "snapshot":
        return this.#takeSnapshot(frame);
      case "heartbeat":
        this.#silence.heartbeat(frame.waiting_on ?? "", now);
        this.#inbox.announce(frame.event_id);
        this.#link.heartbeat(this.#outbox.isAwaitingAck);
    }
  }

  #takeWelcome(frame) {
    const { acked, nextSeqno } = this;
    const accepted = frame.acked ?? 0;
    const counted = `the server has ${accepted} commands of this stream`;
    // The stored state is older than the sent commands. It would use their numbers again (STREAM-11).
    if (this.key && accepted > nextSeqno) return this.#end(new MidstreamError("seqno_reused", `${counted}; ${nextSeqno} were numbered here`));
    this.#inbox.requireSameJournal(frame);
    // Acknowledged commands are deleted here, so they cannot be played back.
    if (this.key && accepted < acked) return this.#end(new MidstreamError("stream_not_found", `${counted}; it had acknowledged ${acked}`));
    this.#inbox.begin(frame);
    this.#inbox.isQueued = this.key !== "" && accepted > 0 && !this.turn && !this.isAbandoned;
    this.#link.welcome(frame.heartbeat_s ?? HEARTBEAT_S);
    this.#secrets.noteWelcome();
    this.#outbox.inFlightMax = Math.max(1, Math.min(frame.in_flight_max ?? IN_FLIGHT_MAX, IN_FLIGHT_MAX));
    this.#outbox.frameBytesMax = frame.frame_bytes_max ?? this.#outbox.frameBytesMax;
    this.isEncrypted = frame.is_encrypted ?? false;
    this.isDegraded = frame.is_degraded ?? false;
    if (this.isDegraded && this.key) this.#delete();
    if (this.key) this.#takeAck(accepted - 1);
  }

  #takeAck(seqno, isSingle = false) {
    if (this.#outbox.acknowledge(seqno, isSingle)) {
      this.#link.noteAck();
      this.#write({ op: "acked", key: this.key, accepted: this.acked }, { op: "stream", value: this.record() });
    }
    this.#sendCommands();
    this.#endIfDone();
  }

  #takeEvents(events) {
    for (const event of events) {
      if (this.phase === "ended") return;
      if (!this.#inbox.take(event)) continue;
      this.#link.noteProgress();
      this.#apply(event);
    }
    this.#endIfDone();
  }

  #apply({ id, record }) {
    const { type, stream, turn, seqno } = record;
    if (this.#inbox.delivers(record)) this.#emit({ type: "record", id, record });
    if (!this.#inbox.isBegun) return;
    if (type === "turn_ended" && (this.damage || (this.key && turn === this.turn))) this.#end(null);
    if (!this.key || stream !== this.key) return;
    if (type === "command_accepted") this.#takeAck(seqno);
    if (type === "message_withdrawn") this.#end(null);
  }

  #takeSnapshot(frame) {
    if (typeof frame.session !== "object" || frame.session === null) throw protocolError("a snapshot has no session");
    this.#move(this.#inbox.replace(frame));
    this.#link.noteProgress();
    if (this.damage ? !OPEN_STATUSES.has(frame.session.status) : this.key && frame.is_over) this.#end(null);
  }

  /** Deliver a change of the position, and store it. */
  #move(event) {
    this.#emit(event);
    this.#write({ op: "stream", value: this.record() });
    this.#endIfDone();
  }

  /** Take a refusal; return whether the connection must end. */
  #takeError(frame, now) {
    const error = new MidstreamError(frame.code, frame.message, frame.retry, frame.retry_after_s ?? null);
    if (!this.isDegraded && this.#secrets.noteRefusal(error)) return true;
    const isPlaybackPossible = frame.code === "seqno_gap" && this.#outbox.has(frame.expected);
    const isFinal = error.code === SESSION_BUSY || FINAL_RETRIES.has(error.retry);
    if (this.isDegraded || (isFinal && !isPlaybackPossible)) this.#end(error);
    else this.#link.refuse(error, now);
    return this.phase !== "ended";
  }

  // --- sending, storing and ends ---

  #submit(payload) {
    if (this.phase === "ended") throw this.error ?? new MidstreamError("usage", "the stream has ended. Nothing was sent");
    const { key, secret } = this;
    const { seqno, frame } = this.#outbox.store(payload);
    if (seqno === 0 && secret) this.#write({ op: "secret", value: { key, secret } });
    this.#write({ op: "command", value: { key, seqno, frame } }, { op: "stream", value: this.record() });
    this.#sendCommands();
    return seqno;
  }

  /** Send the commands that this connection has not sent: new ones, and the unacknowledged ones of earlier connections. */
  #sendCommands() {
    if (this.#link.isOpen) this.#frames.push(...this.#outbox.due(this.phase === "live"));
  }

  #emit(event) { if (!this.isAbandoned) this.#events.push(event); }

  #write(...writes) { if (this.isStored && this.phase !== "ended") this.#writes.push(...writes); }

  #delete() {
    if (this.#storedKey) this.#writes.push({ op: "delete", key: this.#storedKey });
    this.#storedKey = "";
  }

  /** Restart the count of the turn's silence, if there is a connection on which an event can be received. */
  #restartSilence(now) { this.#silence.begin(this.key && this.phase === "live" ? now : Infinity); }

  /** End if the turn had ended by the welcome, and all its events and acks were received. */
  #endIfDone() {
    if (!this.key || !this.isAcknowledged || this.phase !== "live" || this.nextSeqno === 0 || this.#inbox.expected) return;
    if (this.isAbandoned || this.#inbox.isPastTurn) this.#end(null);
  }

  #end(error) {
    if (this.phase === "ended") return;
    if (this.phase === "live" && error === null) this.#frames.push(CLOSE_FRAME);
    this.error = error;
    this.#stop();
    this.#isOver = error === null;
    if (error === null ? this.isAbandoned : !KEEPS_CHECKPOINT.has(error.code)) this.#delete();
  }

  #stop() {
    this.#link.end();
    this.#silence.begin(Infinity);
  }
}
