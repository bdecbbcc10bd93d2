/** The events of one stream: each once, in order, from the position of the last one. */

import { durablePositionAfter, newestEpochAfter, requireDurablePosition } from "./durable_positions.js";
import { protocolError } from "./errors.js";
import { formatEventId, parseEventId } from "./frames.js";

/** The statuses of a turn that has ended. */
const TURN_OVER = new Set(["completed", "cancelled", "failed", "interrupted", "ended"]);

/** The position of a stream in the journal, and the state of its turn. */
export class Inbox {
  isQueued = false; // the message waits for the turns before it, which are not delivered
  expected = "move"; // what comes before the position counts: a "move" (an event, a `gone` or a snapshot), a "snapshot", or ""
  #key;
  #received; // the last applied event, or null
  #promised; // the newest received event that the server must not lose
  #known; // the newest epoch whose beginning the server has sent
  #announced = null; // the position in the last heartbeat; its event must come before the next heartbeat
  #overBy = null; // the newest event at the welcome, if the turn had ended by then

  /** @param key The key of the stream; "" for a reader, which delivers every event. */
  constructor(key, { cursor = null, turn = 0, isWhole = !key || cursor !== null, promised, known = null }) {
    this.#key = key;
    this.turn = turn;
    this.isWhole = isWhole; // events before the stream, and of other turns, are delivered too
    this.isBegun = isWhole || cursor !== null; // the first record of the stream was received
    this.#received = cursor === null ? null : parseEventId(cursor);
    this.#promised = key && promised ? parseEventId(promised) : null;
    this.#known = key ? known : null;
  }

  get cursor() { return formatEventId(this.#received); }

  /** Whether the turn had ended by the welcome, and every event up to then was received. */
  get isPastTurn() {
    return this.#overBy !== null && this.#received.position >= this.#overBy.position;
  }

  /** Return the state to store. */
  record() {
    const { cursor, turn, isWhole } = this;
    return { cursor, turn, isWhole, promised: formatEventId(this.#promised), known: this.#known };
  }

  /** Throw if the server's journal lacks a promised event (STREAM-100, STREAM-105). */
  requireSameJournal({ event_id, resume_from, began_at = null }) {
    requireDurablePosition(this.#promised, parseEventId(event_id), this.#key !== "");
    this.#known = newestEpochAfter(this.#known, this.#promised, parseEventId(resume_from).epoch, began_at);
  }

  /** Take the position and the turn of a welcome. */
  begin({ resume_from, event_id, turn, turn_status }) {
    this.expected = !this.isBegun || resume_from !== this.cursor ? "move" : "";
    if (!this.isBegun || this.#received === null) this.#received = parseEventId(resume_from);
    this.#overBy = TURN_OVER.has(turn_status) ? parseEventId(event_id) : null;
    this.#announced = null;
    this.turn = turn || this.turn;
  }

  /** Take the next event; return false if it was applied before. Throws if one is missing before it. */
  take({ id, record }) {
    const at = parseEventId(id);
    const last = this.#received;
    if (at.position <= last.position && at.epoch <= last.epoch) return false;
    if (at.position !== last.position + 1 || at.epoch < last.epoch) throw protocolError(`event ${id} does not follow ${this.cursor}`);
    const beganAt = record.type === "epoch_started" ? (record.at ?? null) : null;
    this.#known = newestEpochAfter(this.#known, this.#promised, at.epoch, beganAt);
    this.#promised = durablePositionAfter(this.#promised, at, record, this.#key !== "");
    this.#received = at;
    if (this.expected === "move") this.expected = "";
    return true;
  }

  /** Take the record of an event; return whether to deliver it. */
  delivers({ type, stream, turn }) {
    if (!this.#key || stream !== this.#key) return this.isBegun && (this.isWhole || !this.isQueued);
    this.isBegun = true; // the first record of a stream is `stream_opened`
    if (type === "message_queued" || type === "message_accepted") this.isQueued = type === "message_queued";
    if (type === "message_accepted" || type === "turn_resumed") this.turn = turn;
    return true;
  }

  /** Move to where the journal continues, as the events behind it are gone; return the event to deliver. */
  goBack({ resume_from: id, reason, has_snapshot: hasSnapshot = false }) {
    this.#received = parseEventId(id);
    this.isBegun = this.isWhole;
    this.expected = hasSnapshot ? "snapshot" : "";
    this.#announced = null;
    return { type: "gone", id, reason, hasSnapshot };
  }

  /** Move to a snapshot, which replaces all events up to it; return the event to deliver. */
  replace({ event_id: id, session, turn = null }) {
    this.#received = parseEventId(id);
    this.isBegun = true;
    this.expected = "";
    this.#announced = null;
    if (this.#key && turn) {
      this.turn = turn;
      this.isQueued = false;
    }
    return { type: "snapshot", id, session, turn };
  }

  /** Take the newest event of a heartbeat. Throws if the event of the heartbeat before was not received. */
  announce(id) {
    if (this.#announced !== null && this.#received.position < this.#announced) throw protocolError(`${this.#announced} was announced and not sent`);
    this.#announced = parseEventId(id).position;
  }
}

/** Return whether a frame only reports silence (STREAM-47). */
export function isSilence({ type, events }) {
  return type === "events" && events.every(({ record }) => record.type === "stall_noticed");
}
