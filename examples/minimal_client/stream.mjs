/**
 * One stream of the stream protocol, written from docs/spec/minimal-client.md, without a dependency. Each event is delivered
 * once, also after lost connections and kills of this process and of the server. `ask.mjs` is a program that uses it.
 */
import { LOOK_BACK_MS as PATIENCE_MS } from "./checkpoint.mjs";

const words = (text) => new Set(text.split(" "));
const FRAMES = words("welcome ack events gone snapshot heartbeat");
const OVER = words("completed cancelled failed interrupted ended");
/** Codes of errors after which the checkpoint stays. */
const RESUMABLE = words(
  "access agent_mismatch connection_lost events_lost internal key_missing record_undecodable session_locked store_damaged stream_fenced unauthorized",
);
/** Types of records, besides `call_started`, that are on the server's disk before a client receives them (STREAM-100). */
const PROMISED = words(
  "epoch_started stream_opened command_accepted message_accepted message_queued message_withdrawn turn_resumed " +
    "turn_ended question_answered answer_used cancel_requested transcript_accepted",
);
const CANCEL = '{"type":"cancel"}';
const CLOSE = '{"type":"close"}';
export const CLOCK = { now: () => performance.now(), set: setTimeout, clear: clearTimeout };
/** The server broke the protocol: drop the connection. */
class Broken extends Error {}
function parse(id) {
  const [, epoch, position] = /^(\d+)-(\d+)$/.exec(id === "0" ? "0-0" : id) ?? [];
  if (position === undefined) throw new Broken(`no event id: ${id}`);
  return { id: `${epoch}-${position}`, epoch: Number(epoch), position: Number(position) };
}

/** One stream. `onevents` receives new events; call `handled` with the last handled one, which is not delivered again. */
export class Stream {
  phase = "waiting"; // then connecting, opening, live; ended
  code = null; // the error code that ended it, or null
  isDegraded = false;
  failures = 0; // connections lost in a row
  #lostAt = 0;
  #end = null; // the event at which it ended without an error
  #handled; // the last handled event
  #socket = null;
  #timer;

  constructor(url, checkpoint, kept, { onevents, token = "", onended = () => {}, clock = CLOCK, chance = Math.random }) {
    Object.assign(this, { url, checkpoint, kept, token, onevents, onended, clock, chance });
    this.at = kept.cursor === null ? null : parse(kept.cursor); // the last event that was received
    this.isBegun = this.at !== null; // whether its `stream_opened` was received
    this.#handled = kept.cursor;
    this.#within(0);
  }
  handled(id, shown = this.kept.shown) {
    this.#handled = id;
    this.#save({ cursor: this.isBegun ? id : null, shown });
    if (id === this.#end) this.checkpoint.remove();
  }
  cancel() {
    const { unacked, next_seqno: n } = this.kept;
    if (this.phase === "ended" || Object.values(unacked).includes(CANCEL)) return;
    this.#save({ unacked: { ...unacked, [n]: CANCEL }, next_seqno: n + 1 });
    this.#sendCommands();
  }
  /** End the connection. The turn continues, and the checkpoint stays. */
  detach() {
    if (this.phase === "live") this.#socket.send(CLOSE);
    this.#stop(null);
  }
  #save(changes) {
    Object.assign(this.kept, changes);
    if (this.checkpoint.isThere) this.checkpoint.save(this.kept);
  }

  /** Set the only timer: when it fires, connect, or drop the silent connection. */
  #within(ms) {
    this.clock.clear(this.#timer);
    this.#timer = this.clock.set(() => (this.phase === "waiting" ? this.#connect() : this.#lost()), ms);
  }
  #connect() {
    this.phase = "connecting";
    this.#save({ connection: this.kept.connection + 1 });
    this.#within(10_000);
    if (this.token) this.#openByTicket(this.kept.connection);
    else this.#openSocket("");
  }
  /** Open a connection with a ticket, as a WebSocket sends no token (STREAM-71). */
  async #openByTicket(connection) {
    const headers = { authorization: `Bearer ${this.token}`, "content-type": "application/json" };
    const request = { method: "POST", redirect: "error", headers, body: '{"action":"send"}' };
    const answer = await fetch(`${this.url}/v1/sessions/${this.kept.session}/tickets`, request).catch(() => null);
    const { token, type, code, retry, retry_after_s } = (await answer?.json().catch(() => null)) ?? {};
    if (this.phase !== "connecting" || this.kept.connection !== connection) return; // the connection has ended since
    if (token) this.#openSocket(`?ticket=${token}`);
    else if (`${type}`.startsWith("urn:midstream:error:")) this.#refused({ code, retry, retry_after_s });
    else this.#lost(); // also if a proxy answered (STREAM-107)
  }
  #openSocket(query) {
    const socket = new WebSocket(`${this.url.replace(/^http/, "ws")}/v1/sessions/${this.kept.session}/stream${query}`);
    const ifCurrent = (act) => (event) => this.#socket === socket && act(event);
    this.#socket = socket;
    socket.onopen = ifCurrent(() => this.#open());
    socket.onmessage = ifCurrent(({ data }) => this.#receive(data));
    socket.onclose = socket.onerror = ifCurrent(() => this.#lost());
  }
  #open() {
    Object.assign(this, { phase: "opening", sent: 0, unanswered: 0, most: 64, named: null, overBy: null });
    const { key: stream, secret, next_seqno, connection } = this.kept;
    const event_id = this.isBegun ? this.at.id : null;
    this.#socket.send(JSON.stringify({ type: "open", stream, secret, event_id, next_seqno, connection }));
    this.#sendCommands();
    this.#within((this.silenceMs = 30_000));
  }
  #sendCommands() {
    if (this.phase !== "opening" && this.phase !== "live") return;
    const numbers = Object.keys(this.kept.unacked).map(Number);
    let flying = numbers.filter((n) => n < this.sent).length;
    for (const n of numbers.filter((each) => each >= this.sent)) {
      if (flying++ >= this.most) return;
      this.#socket.send(`{"type":"command","seqno":${n},"payload":${this.kept.unacked[n]}}`);
      this.sent = n + 1;
    }
  }
  #lost(retryAfterS = 0) {
    this.#disconnect();
    const now = this.clock.now();
    if (this.failures === 0) this.#lostAt = now;
    this.failures += 1;
    const isTooLong = this.failures > 1 && now - this.#lostAt >= PATIENCE_MS;
    if (this.isDegraded || isTooLong) return this.#stop("connection_lost");
    this.phase = "waiting";
    const longest = Math.min(30_000, 1000 * 2 ** (this.failures - 2), Math.max(1000, now - this.#lostAt));
    const pause = this.failures === 1 ? 0 : this.chance() * longest;
    this.#within(Math.max(Math.min(pause, this.#lostAt + PATIENCE_MS - now), 1000 * Math.min(120, retryAfterS)));
  }
  #disconnect() {
    const socket = this.#socket;
    this.#socket = null;
    socket?.close();
  }
  #stop(code) {
    this.clock.clear(this.#timer);
    this.#disconnect();
    Object.assign(this, { phase: "ended", code });
    this.onended(code);
    if (code !== null && !RESUMABLE.has(code)) this.checkpoint.remove();
  }
  /** End without an error at an event. The checkpoint is deleted when the application has handled it. */
  #finish(id) {
    this.#socket.send(CLOSE);
    this.#end = id;
    this.#stop(null);
    if (this.#handled === id) this.checkpoint.remove();
  }

  /** Take a frame: call the method with the name of its type. */
  #receive(text) {
    try {
      const frame = JSON.parse(text);
      const isInOrder = (frame.type === "welcome") === (this.phase === "opening");
      if (frame.type === "error") this.#refused(frame);
      else if (FRAMES.has(frame.type) && !isInOrder) throw new Broken("a welcome comes first, and once");
      else if (FRAMES.has(frame.type)) this[frame.type](frame);
      if (this.phase === "live") this.#finishIfOver();
    } catch (error) {
      if (!(error instanceof Broken || error instanceof SyntaxError || error instanceof TypeError)) throw error;
      return this.#lost();
    }
    if (this.phase === "live" || this.phase === "opening") this.#within(this.silenceMs);
  }
  /** End if the turn had ended before this connection (STREAM-26). */
  #finishIfOver() {
    const isHere = this.overBy !== null && !this.isMoving && this.at.position >= this.overBy.position;
    if (isHere && this.kept.acked === this.kept.next_seqno) this.#finish(this.at.id);
  }
  welcome({ acked = 0, turn = 0, turn_status = "", began_at = null, heartbeat_s = 10, in_flight_max = 64, ...frame }) {
    const [newest, from, promised] = [parse(frame.event_id), parse(frame.resume_from), this.kept.promised];
    const isOlder = promised && (newest.position < parse(promised).position || newest.epoch < parse(promised).epoch);
    if (acked > this.kept.next_seqno) return this.#stop("seqno_reused");
    if (isOlder || !this.#isSameEpoch(from.epoch, began_at)) return this.#stop("events_lost");
    if (acked < this.kept.acked) return this.#stop("stream_not_found");
    Object.assign(this, { phase: "live", silenceMs: 3000 * heartbeat_s, isDegraded: frame.is_degraded ?? false });
    this.most = Math.max(1, Math.min(in_flight_max, 64));
    this.checkpoint.noteEncryption(frame.is_encrypted ?? false, this.kept.secret);
    if (this.isDegraded) this.checkpoint.remove();
    this.isMoving = !this.isBegun || this.at.id !== from.id;
    if (!this.isBegun) this.at = from;
    this.kept.turn = turn || this.kept.turn;
    if (OVER.has(turn_status)) this.overBy = newest;
    this.#acknowledge((n) => n < acked);
  }
  ack({ seqno, is_single = false }) {
    if (!(seqno < this.kept.next_seqno)) throw new Broken("an ack of a command that was never sent");
    this.#acknowledge((n) => (is_single ? n === seqno : n <= seqno));
  }
  #acknowledge(isAcked) {
    const all = Object.entries(this.kept.unacked);
    const left = all.filter(([n]) => !isAcked(Number(n)));
    if (left.length < all.length) {
      const acked = left.length ? Number(left[0][0]) : this.kept.next_seqno;
      if (acked > this.kept.acked) this.unanswered = this.failures = 0;
      this.#save({ unacked: Object.fromEntries(left), acked });
    }
    this.#sendCommands();
  }
  events({ events }) {
    const fresh = [];
    let [end, failure] = [null, null];
    for (const { id, record } of events) {
      const at = parse(id);
      if (at.position <= this.at.position && at.epoch <= this.at.epoch) continue; // it was applied before
      if (at.position !== this.at.position + 1 || at.epoch < this.at.epoch) failure = () => this.#lost(); // a gap
      else if (this.#isReplaced(at, record)) failure = () => this.#stop("events_lost");
      if (failure) break;
      [this.at, this.isMoving, this.failures] = [at, false, 0];
      if (this.#isShown(record)) fresh.push({ id, record });
      const isOwn = record.stream === this.kept.key || record.turn === this.kept.turn;
      if (isOwn && (record.type === "turn_ended" || record.type === "message_withdrawn")) end = id;
      if (end) break;
    }
    if (fresh.length > 0) this.onevents(fresh);
    if (failure) failure();
    else if (end) this.#finish(end);
  }
  #isShown({ type, stream, seqno, turn }) {
    const isOwn = stream === this.kept.key;
    if (isOwn && type === "stream_opened") this.isBegun = true;
    if (isOwn && type === "message_accepted") this.kept.turn = turn;
    if (isOwn && type === "command_accepted") this.#acknowledge((n) => n <= seqno);
    return this.isBegun && (isOwn || (turn ?? this.kept.turn) === this.kept.turn);
  }
  /** Return whether an event replaces another one that was on the server's disk (STREAM-100, STREAM-105). */
  #isReplaced(at, record) {
    const promised = this.kept.promised && parse(this.kept.promised);
    const isOther = promised && at.position === promised.position && at.epoch !== promised.epoch;
    if (isOther || (promised && at.position < promised.position && at.epoch > promised.epoch)) return true;
    if (record.type === "epoch_started" && !this.#isSameEpoch(at.epoch, record.at)) return true;
    const isPromised = PROMISED.has(record.type) || (record.type === "call_started" && record.has_effects !== false);
    if (isPromised && !(promised && at.position <= promised.position)) this.kept.promised = at.id;
    return false;
  }
  #isSameEpoch(epoch, at) {
    const { known, promised } = this.kept;
    const isSure = at !== null && known !== null && promised !== null;
    if (isSure && known.epoch === epoch) return known.at === at;
    if (at !== null && !(isSure && known.epoch > epoch)) this.kept.known = { epoch, at };
    return true;
  }
  gone({ resume_from: id, has_snapshot = false }) {
    Object.assign(this, { at: parse(id), isBegun: false, isMoving: has_snapshot, named: null });
    this.#handled = id;
    this.#save({ cursor: null, shown: {} });
    this.onevents([{ id, gone: true }]);
  }
  snapshot({ event_id: id, session, is_over = false, turn }) {
    Object.assign(this, { at: parse(id), isBegun: true, isMoving: false, named: null, failures: 0 });
    this.kept.turn = turn || this.kept.turn;
    this.onevents([{ id, session }]);
    if (is_over) this.#finish(id);
  }
  heartbeat({ event_id }) {
    const newest = parse(event_id).position;
    if (this.named !== null && this.at.position < this.named) throw new Broken("an event did not come");
    this.named = newest;
    const isOwed = Object.keys(this.kept.unacked).some((n) => n < this.sent);
    if (isOwed && ++this.unanswered === 3) throw new Broken("an ack did not come");
    this.failures = 0;
  }
  #refused({ code, retry = "never", expected = null, retry_after_s = null }) {
    const isPassing = retry !== "never" && retry !== "ask" && code !== "session_busy";
    const isGap = code === "seqno_gap" && expected in this.kept.unacked;
    if (this.isDegraded || !(isPassing || isGap)) this.#stop(code);
    else this.#lost(retry_after_s ?? 0);
  }
}
