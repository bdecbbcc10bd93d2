/**
 * One live connection for all tabs that follow the same session.
 *
 * The tab that holds the session's lock leads: it tells the others, over a BroadcastChannel, every frame it hears. A
 * tab that joins begins with a connection of its own and lets go of it as soon as it has caught up with the leader.
 * Nothing here decides what is shown: a frame that was shown before is dropped by the `Stream`, and one that leaves a
 * hole makes it connect again. So the worst that a race or a frozen tab can cost is a connection of one's own.
 *
 * What tabs tell each other: `{ask: true}` and `{ping: true}` to the leader, `{at: position}` and `{frame}` from it.
 */

import { letGo } from "./lines.js";
import { parseEventId } from "./stream.js";

/** Within this many milliseconds a leader answers another tab, or loses the lead: it is frozen. */
const ANSWER_WITHIN_MS = 2000;
/** Within this many milliseconds the server answers the leader, or its connection is given up. */
const PONG_WITHIN_MS = 5000;
const PING = '{"type":"ping"}';
/** Frames about the leader's own connection. */
const PRIVATE = new Set(["welcome", "gone", "snapshot", "error"]);

/** Whether tabs can find each other in this browser. */
export function canShare() {
  return Boolean(globalThis.navigator?.locks && globalThis.BroadcastChannel);
}

/** A line of followers: a connection of this tab's own, then perhaps another tab's. */
export class SharedLine {
  onopen = null;
  onmessage = null;
  onclose = null;
  onheard = null;
  #name;
  #channel;
  #line; // null where another tab's is used
  #from; // the event after which this tab asked for more
  #at = null; // the position of the last event that came here
  #leaderAt = null; // the same of the leader, as far as it is known
  #isLeading = false;
  #isOver = false;
  #queue = new AbortController();
  #release = () => {};
  #timer = null;

  /** @param place What is followed: tabs with the same one share. `dial` makes a connection to it. */
  constructor(place, dial) {
    this.#name = `midstream ${place}`;
    this.#channel = new BroadcastChannel(this.#name);
    this.#channel.onmessage = ({ data }) => (this.#isLeading ? this.#asked(data) : this.#told(data));
    this.#line = dial();
    this.#line.onopen = () => this.onopen?.({});
    this.#line.onmessage = ({ data }) => this.#received(data);
    this.#line.onheard = () => this.onheard?.({});
    this.#line.onclose = (event) => this.#end(event?.error);
    this.#lead({ signal: this.#queue.signal });
  }

  send(frame) {
    if (this.#from === undefined) this.#from = read(frame).event_id ?? null;
    if (this.#line) this.#line.send(frame);
    else if (frame === PING) this.#tell({ ping: true });
  }

  close() {
    this.onopen = this.onmessage = this.onclose = this.onheard = null;
    this.#end();
  }

  /** Queue for the lead, or steal it; hold it until this ends or another tab steals it. */
  #lead(options) {
    let isHeld = false;
    const hold = () =>
      new Promise((release) => {
        isHeld = true;
        this.#release = release;
        // Whoever has only the former leader's connection begins anew with one of its own.
        if (this.#line === null) return this.#end() ?? release();
        clearTimeout(this.#timer);
        this.#isLeading = true;
        this.#tell({ at: this.#at });
      });
    navigator.locks.request(this.#name, options, hold).catch(() => isHeld && this.#end());
  }

  /** A frame of this tab's own connection. */
  #received(data) {
    const frame = read(data);
    this.#at = positionOf(frame, this.#from) ?? this.#at;
    if (this.#isLeading) {
      clearTimeout(this.#timer);
      this.#tell(PRIVATE.has(frame.type) ? { at: this.#at } : { frame: data });
    } else if (frame.type === "welcome") this.#ask();
    this.onmessage?.({ data });
    this.#letGo();
  }

  #ask() {
    this.#tell({ ask: true });
    this.#within(ANSWER_WITHIN_MS, () => {
      this.#queue.abort();
      this.#lead({ steal: true });
    });
  }

  /** Another tab speaks to this one, which leads. */
  #asked({ ask, ping }) {
    if (ask) this.#tell({ at: this.#at });
    if (!ping) return;
    this.#line.send(PING);
    this.#within(PONG_WITHIN_MS, () => this.#end());
  }

  /** The leader speaks, or another follower. */
  #told({ frame, at }) {
    if (frame === undefined && at === undefined) return;
    clearTimeout(this.#timer);
    if (this.#line === null) {
      if (frame !== undefined) this.onmessage?.({ data: frame });
      return;
    }
    this.#leaderAt = (frame === undefined ? at : positionOf(read(frame), null)) ?? this.#leaderAt;
    this.#letGo();
  }

  /** Whoever has all that the leader has needs no connection of its own. */
  #letGo() {
    if (this.#isLeading || this.#at === null || this.#leaderAt === null) return;
    if (this.#at >= this.#leaderAt) this.#dropLine();
  }

  #tell(message) {
    if (!this.#isOver) this.#channel.postMessage(message);
  }

  #within(milliseconds, act) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(act, milliseconds);
  }

  #dropLine() {
    letGo(this.#line);
    this.#line = null;
  }

  #end(error = null) {
    if (this.#isOver) return;
    this.#isOver = true;
    clearTimeout(this.#timer);
    this.#queue.abort();
    this.#release();
    this.#channel.close();
    this.#dropLine();
    this.onclose?.({ error });
  }
}

/** What cannot be read is the `Stream`'s business. */
function read(data) {
  try {
    return JSON.parse(data) ?? {};
  } catch {
    return {};
  }
}

/**
 * Return the position of the last event that a tab has after a frame, or null where the frame does not say: as with a
 * welcome that goes on elsewhere than `asked`, and with what a snapshot follows.
 */
function positionOf(frame, asked) {
  const isElsewhere = frame.type === "welcome" && asked !== null && asked !== frame.resume_from;
  if (isElsewhere || frame.has_snapshot) return null;
  const ids = { events: frame.events?.at(-1)?.id, snapshot: frame.event_id };
  try {
    return parseEventId(ids[frame.type] ?? frame.resume_from).position;
  } catch {
    return null;
  }
}
