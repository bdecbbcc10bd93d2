/** The commands of one stream until their acks. The frame of a command is built once, so all repetitions have the same bytes. */

import { MidstreamError, protocolError } from "./errors.js";
import { FRAME_BYTES_MAX, IN_FLIGHT_MAX, parseFrame } from "./frames.js";
import { refuseBrokenText } from "./texts.js";

const COMMANDS_MAX = 10_000;

export class Outbox {
  inFlightMax = IN_FLIGHT_MAX;
  frameBytesMax = FRAME_BYTES_MAX;
  #sent = 0; // commands below this number were sent on this connection
  #unacked; // the unacknowledged commands: {seqno, frame}, in order
  #ackedApart = new Set(); // their numbers that were acknowledged one by one (STREAM-53)

  constructor({ acked = 0, nextSeqno = 0, commands = [] }) {
    this.acked = acked; // commands below this number are in the server's journal
    this.nextSeqno = nextSeqno;
    this.#unacked = [...commands].sort((a, b) => a.seqno - b.seqno);
    const cancel = this.#unacked.find(({ frame }) => parseFrame(frame)?.payload?.type === "cancel");
    this.cancelSeqno = cancel?.seqno ?? null; // the number of the command that cancels the turn
  }

  get isAcknowledged() { return this.#unacked.length === 0; }
  get isAwaitingAck() { return this.#sent > this.acked; } // of a command that was sent on this connection
  get isCancelAcked() { return this.cancelSeqno !== null && this.cancelSeqno < this.acked; }

  /** The text of the unacknowledged message, or null. */
  get pendingText() {
    for (const { frame } of this.#unacked) {
      const { payload } = JSON.parse(frame);
      if (payload.type === "send") return payload.parts.map((part) => part.text ?? "").join("");
    }
    return null;
  }

  has(seqno) { return this.#unacked.some((command) => command.seqno === seqno); }

  /** Number a payload; return its command. Throws, and changes nothing, if it is too large or has a lone surrogate. */
  store(payload) {
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
    this.#unacked.push({ seqno, frame });
    return { seqno, frame };
  }

  /** Delete the commands up to `seqno`, or this one alone; return whether `acked` rose. Throws if it was never sent. */
  acknowledge(seqno, isSingle = false) {
    if (!(seqno < this.nextSeqno) || (isSingle && seqno < 0)) throw protocolError(`command ${seqno} was acknowledged and never sent`);
    if (isSingle && seqno > this.acked) {
      this.#ackedApart.add(seqno); // it stays until all commands before it are acknowledged
      return false;
    }
    if (seqno < this.acked) return false;
    this.acked = seqno + 1;
    if (isSingle) while (this.#ackedApart.has(this.acked)) this.acked += 1;
    for (const each of this.#ackedApart) if (each < this.acked) this.#ackedApart.delete(each);
    this.#unacked = this.#unacked.filter((command) => command.seqno >= this.acked);
    this.#sent = Math.max(this.#sent, this.acked);
    return true;
  }

  /** Begin a connection: everything that is not acknowledged is sent again. */
  playBack() { this.#sent = this.acked; }

  /** Return the frames to send now, and count them as sent. */
  due(isWelcomed) {
    const frames = [];
    const room = this.acked + this.#ackedApart.size + this.inFlightMax;
    for (const { seqno, frame, isFiller } of this.#unacked) {
      if (seqno < this.#sent || seqno >= room) continue;
      if (isFiller && !isWelcomed) break; // the server may have the lost command
      if (!this.#ackedApart.has(seqno)) frames.push(frame);
      this.#sent = seqno + 1;
    }
    return frames;
  }
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
