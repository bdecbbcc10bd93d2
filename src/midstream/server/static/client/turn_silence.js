/** The silence of a turn: when a turn that waits for a machine has stalled (STREAM-47). A stall is only reported. */

/** Time without an event after which a turn that waits for a machine has stalled. */
export const STALL_AFTER_MS = 60_000;
/** Values of `waitingOn` for which silence is a stall. A person may take days. */
const MACHINES = new Set(["model", "tool", "client"]);

/** Measures how long no event was received on a connection. Only heartbeats have what the turn waits for. */
export class TurnSilence {
  waitingOn = ""; // at the last heartbeat
  dueAt = Infinity; // the time for the next call of `judge`
  #state = "unknown"; // whether a heartbeat came since the last event: "unknown", "requested" or "known"; or "stalled"
  #stallAfterMs;

  constructor(stallAfterMs = STALL_AFTER_MS) {
    this.#stallAfterMs = stallAfterMs;
  }

  get isStalled() { return this.#state === "stalled"; }

  /** Restart the count, as an event was received or a connection began. Infinity stops it. */
  begin(now) {
    this.#state = "unknown";
    this.dueAt = now + this.#stallAfterMs;
  }

  heartbeat(waitingOn, now) {
    this.waitingOn = waitingOn;
    if (this.#state === "requested") this.#decide(now);
    else if (this.#state === "unknown") this.#state = "known";
  }

  /** Do what is due; return whether to request a heartbeat. */
  judge(now) {
    if (now < this.dueAt) return false;
    if (this.#state === "known") return this.#decide(now);
    this.#state = "requested";
    this.dueAt = Infinity;
    return true;
  }

  /** Decide whether the silence is a stall. A turn that waits for a person is checked again later. */
  #decide(now) {
    this.#state = MACHINES.has(this.waitingOn) ? "stalled" : "known";
    this.dueAt = this.isStalled ? Infinity : now + this.#stallAfterMs;
    return false;
  }
}
