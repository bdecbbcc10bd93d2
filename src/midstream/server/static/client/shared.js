/**
 * One connection for all tabs that follow the same session.
 *
 * The tab that holds the session's lock is the leader. It sends every received frame to the others, over a
 * BroadcastChannel. A new tab begins with its own connection, and closes it when it has caught up with the leader.
 *
 * `Stream` decides about each frame: it drops repeated frames, and reconnects after a gap. So a race or a frozen tab costs at
 * most one connection more.
 *
 * Messages to the leader are `{ask: true}` and `{ping: true}`; messages of the leader are `{at: position}` and `{frame}`.
 */

import { closeQuietly, errorOfClose } from "./connections.js";
import { PING_FRAME, parseEventId, parseFrame } from "./frames.js";
import { hasLocks } from "./locks.js";

/** Limit for the leader's answer to another tab. Without an answer the leader is frozen, and loses the lead. */
const ANSWER_WITHIN_MS = 2000;
/** Limit for the server's answer to a ping of the leader. Without an answer its connection ends. */
const PONG_WITHIN_MS = 5000;
/** Types of frames that concern the leader's connection only. */
const PRIVATE = new Set(["welcome", "gone", "snapshot", "error"]);

/** Return whether tabs can share a connection in this browser. */
export function canShare() {
  return hasLocks() && Boolean(globalThis.BroadcastChannel);
}

/** The connection of a reader: its own connection at first, later that of the leader. */
export class SharedConnection {
  onopen = null;
  onmessage = null;
  onclose = null;
  onbytes = null;
  #name;
  #channel;
  #connection; // null while this tab uses the connection of the leader
  #from; // the event id of this tab's `open` frame
  #at = null; // the position of the last event that this tab received
  #leaderAt = null; // the last reported position of the leader
  #isLeading = false;
  #isOver = false;
  #queue = new AbortController();
  #release = () => {};
  #timer = null;

  /** @param target The server and the session: tabs with the same target share. `dial` returns a connection to it. */
  constructor(target, dial) {
    this.#name = `midstream ${target}`;
    this.#channel = new BroadcastChannel(this.#name);
    this.#channel.onmessage = ({ data }) => (this.#isLeading ? this.#takeRequest(data) : this.#takeFromLeader(data));
    this.#connection = dial();
    this.#connection.onopen = () => this.onopen?.({});
    this.#connection.onmessage = ({ data }) => this.#received(data);
    this.#connection.onbytes = () => this.onbytes?.({});
    this.#connection.onclose = (event) => this.#end(errorOfClose(event));
    this.#lead({ signal: this.#queue.signal });
  }

  send(frame) {
    if (this.#from === undefined) this.#from = parse(frame).event_id ?? null;
    if (this.#connection) this.#connection.send(frame);
    else if (frame === PING_FRAME) this.#post({ ping: true });
  }

  close() {
    this.onopen = this.onmessage = this.onclose = this.onbytes = null;
    this.#end();
  }

  /** Request the lock of the leader, and hold it until this connection ends or another tab steals the lock. */
  #lead(options) {
    let isHeld = false;
    const hold = () =>
      new Promise((release) => {
        isHeld = true;
        this.#release = release;
        // A tab that used the connection of the former leader has none now. It ends and reconnects.
        if (this.#connection === null) return this.#end() ?? release();
        clearTimeout(this.#timer);
        this.#isLeading = true;
        this.#post({ at: this.#at });
      });
    navigator.locks.request(this.#name, options, hold).catch(() => isHeld && this.#end());
  }

  /** Take a frame of this tab's own connection. */
  #received(data) {
    const frame = parse(data);
    this.#at = positionOf(frame, this.#from) ?? this.#at;
    if (this.#isLeading) {
      clearTimeout(this.#timer);
      this.#post(PRIVATE.has(frame.type) ? { at: this.#at } : { frame: data });
    } else if (frame.type === "welcome") this.#requestPosition();
    this.onmessage?.({ data });
    this.#closeIfCaughtUp();
  }

  #requestPosition() {
    this.#post({ ask: true });
    this.#within(ANSWER_WITHIN_MS, () => {
      this.#queue.abort();
      this.#lead({ steal: true });
    });
  }

  /** Take a message of another tab, as the leader. */
  #takeRequest({ ask, ping }) {
    if (ask) this.#post({ at: this.#at });
    if (!ping) return;
    this.#connection.send(PING_FRAME);
    this.#within(PONG_WITHIN_MS, () => this.#end());
  }

  /** Take a message of the leader; ignore those of other tabs. */
  #takeFromLeader({ frame, at }) {
    if (frame === undefined && at === undefined) return;
    clearTimeout(this.#timer);
    if (this.#connection === null) {
      if (frame !== undefined) this.onmessage?.({ data: frame });
      return;
    }
    this.#leaderAt = (frame === undefined ? at : positionOf(parse(frame), null)) ?? this.#leaderAt;
    this.#closeIfCaughtUp();
  }

  /** Close this tab's own connection once it has every event that the leader has. */
  #closeIfCaughtUp() {
    if (this.#isLeading || this.#at === null || this.#leaderAt === null) return;
    if (this.#at >= this.#leaderAt) this.#closeConnection();
  }

  #post(message) {
    if (!this.#isOver) this.#channel.postMessage(message);
  }

  #within(milliseconds, act) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(act, milliseconds);
  }

  #closeConnection() {
    closeQuietly(this.#connection);
    this.#connection = null;
  }

  #end(error = null) {
    if (this.#isOver) return;
    this.#isOver = true;
    clearTimeout(this.#timer);
    this.#queue.abort();
    this.#release();
    this.#channel.close();
    this.#closeConnection();
    this.onclose?.({ error });
  }
}

/** Return a frame, or {} if it is malformed. `Stream` handles malformed frames. */
const parse = (data) => parseFrame(data) ?? {};

/**
 * Return the position of the last event that a tab has after a frame; null if the frame has none. A welcome that continues
 * elsewhere than at `requested`, and a frame before a snapshot, have none.
 */
function positionOf(frame, requested) {
  const isElsewhere = frame.type === "welcome" && requested !== null && requested !== frame.resume_from;
  if (isElsewhere || frame.has_snapshot) return null;
  const ids = { events: frame.events?.at(-1)?.id, snapshot: frame.event_id };
  try {
    return parseEventId(ids[frame.type] ?? frame.resume_from).position;
  } catch {
    return null;
  }
}
