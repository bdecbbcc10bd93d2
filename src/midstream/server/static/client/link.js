/** The connections of one stream, one after another: the phase of the current one, and when the next one is tried. */

import { FINAL_RETRIES, connectionLostError, protocolError } from "./errors.js";
import { HEARTBEAT_S } from "./frames.js";
import * as retries from "./retries.js";

/** Time without a working connection after which the stream ends. It can still be resumed. */
export const PATIENCE_MS = 2 * 60 * 60 * 1000;
/**
 * Limit for the first connection to a server, and for each try of a connection. It is enough for three transports: each
 * has shorter limits of its own (`transports.js`).
 */
export const REACH_WITHIN_MS = 20_000;
const PING_WITHIN_MS = 5000; // from a ping to the next bytes
const WAKE_EVERY_MS = 1000; // shortest time between two tries that `wake` starts
/** Connections that one page can make for a stream. The connection numbers of the next page begin above them. */
const CONNECTIONS_OF_A_LIFE = 2 ** 24;

/**
 * Return the milliseconds to wait after `failures` failures in a row, the first of them `outageMs` ago. `chance` is in
 * [0, 1). No pause is longer than the outage so far, so that several short pauses cannot cause a long one (STREAM-29).
 */
export function backoffMs(failures, chance, outageMs = Infinity) {
  if (failures <= 0) return 0;
  const doubled = retries.RECONNECT_FIRST_MS * 2 ** Math.min(failures - 1, 16);
  const most = Math.min(retries.RECONNECT_MOST_MS, doubled, Math.max(retries.RECONNECT_FIRST_MS, outageMs));
  return Math.round(most * (1 - chance));
}

/** Return the pause that a server requests with an error. */
const pauseMs = (error) => Math.min(1000 * (error?.retryAfterS ?? 0), retries.RETRY_AFTER_MAX_MS);

/**
 * | phase | meaning |
 * | --- | --- |
 * | "waiting" | no connection until `deadlineAt` |
 * | "connecting" | the connection is being made |
 * | "opening" | the connection is open; the welcome is due |
 * | "live" | the welcome was received |
 * | "ended" | no further connection is made |
 */
export class Link {
  phase = "waiting";
  isReconnecting = false; // a connection was lost and not made again
  trouble = null; // the last temporary refusal, until an event or an ack is received
  #patienceMs;
  #failures = 0;
  #lostAt = 0; // the time of the first of these failures
  #lastFailure = ""; // why the last connection failed
  #retryAt = 0; // no try is made before
  #wokenAt = -Infinity;
  #silenceMs = retries.HEARTBEATS_MISSED_MAX * 1000 * HEARTBEAT_S;
  #isPinged = false; // a ping was sent, and its answer is due
  #unanswered = 0; // heartbeats received while an ack was due
  #isReached; // the server sent a welcome to this client, or to an earlier page
  #reachWithinMs;
  #reachBy; // the limit for the first welcome; Infinity after it

  constructor(life, { patienceMs = PATIENCE_MS, reachWithinMs = Infinity, isReached = false }, now) {
    this.number = life * CONNECTIONS_OF_A_LIFE; // of the newest connection
    this.deadlineAt = now;
    this.#patienceMs = patienceMs;
    this.#isReached = life > 0 || isReached;
    this.#reachWithinMs = this.#isReached ? Infinity : reachWithinMs;
    this.#reachBy = now + this.#reachWithinMs;
  }

  get isOpen() { return this.phase === "opening" || this.phase === "live"; } // frames are exchanged
  get isWanted() { return this.phase === "connecting" || this.isOpen; }
  get dueAt() { return Math.min(this.deadlineAt, this.#reachBy); }

  open(now) {
    this.phase = "opening";
    this.number += 1;
    this.noteTraffic(now);
  }

  welcome(heartbeatS) {
    this.phase = "live";
    this.isReconnecting = false;
    this.#isReached = true;
    this.#reachBy = Infinity;
    this.#retryAt = 0;
    this.#unanswered = 0;
    if (heartbeatS > 0) this.#silenceMs = retries.HEARTBEATS_MISSED_MAX * Math.min(1000 * heartbeatS, retries.HEARTBEAT_MAX_MS);
  }

  /** Restart the count of the server's silence. */
  noteTraffic(now) {
    if (!this.isOpen) return;
    this.#isPinged = false;
    this.deadlineAt = now + this.#silenceMs;
  }

  /** End the count of failures, as an event or an ack was received. */
  noteProgress() {
    this.#failures = 0;
    this.trouble = null;
  }

  noteAck() {
    this.#unanswered = 0;
    this.noteProgress();
  }

  /** Count a heartbeat. Throws if too many were received while an ack was due (STREAM-14). */
  heartbeat(isAwaitingAck) {
    if (isAwaitingAck) this.#unanswered += 1;
    if (this.#unanswered >= retries.HEARTBEATS_MISSED_MAX) throw protocolError("a command was not acknowledged");
    this.#failures = 0;
  }

  /** Take a temporary refusal. The next connection plays back what was refused. */
  refuse(error, now) {
    this.trouble = error;
    this.delayUntil(now + pauseMs(error));
  }

  /** Return whether an error ends the stream. A refusal from something between client and server is temporary (STREAM-107). */
  isFinal(error) {
    return FINAL_RETRIES.has(error?.retry) && !(this.#isReached && error.isForeign && error.code !== "access");
  }

  /**
   * Plan the next try after a connection was lost or not made; return the error if the patience has ended. The first try is
   * immediate, as most cuts are short. The last one is at the end of the patience, which is shorter for a cancelled turn.
   */
  lose(error, isCancelled, chance, now) {
    if (error !== null && error.code !== "connection_lost") this.trouble = error;
    this.#lastFailure = error?.message ?? this.#lastFailure;
    this.#isPinged = false;
    if (this.#failures === 0) this.#lostAt = now;
    this.#failures += 1;
    const patienceMs = isCancelled ? Math.min(retries.STOPPED_PATIENCE_MS, this.#patienceMs) : this.#patienceMs;
    if (this.#failures > 1 && now - this.#lostAt >= patienceMs) return connectionLostError(`no working connection for ${patienceMs / 1000} s`);
    this.phase = "waiting";
    this.isReconnecting = true;
    const waitMs = backoffMs(this.#failures - 1, chance, now - this.#lostAt);
    this.deadlineAt = Math.min(now + waitMs, this.#lostAt + patienceMs);
    this.delayUntil(now + pauseMs(error));
    return null;
  }

  /** Make no try before `retryAt`. */
  delayUntil(retryAt) {
    this.#retryAt = Math.max(this.#retryAt, retryAt);
    if (this.phase === "waiting") this.deadlineAt = Math.max(this.deadlineAt, this.#retryAt);
  }

  /** Connect now, or test the open connection; return whether to send a ping. */
  wake(now, isLate = false) {
    if (this.phase === "waiting") {
      const soonest = Math.max(now, this.#retryAt, this.#wokenAt + WAKE_EVERY_MS);
      if (soonest < this.deadlineAt) this.#wokenAt = this.deadlineAt = soonest;
    }
    if (this.phase !== "live" || this.#isPinged) return false;
    this.#isPinged = true;
    this.deadlineAt = Math.min(isLate ? Infinity : this.deadlineAt, now + PING_WITHIN_MS);
    return true;
  }

  /** Do what is due; return whether the connection must end. */
  handleDeadline(now) {
    if (now < this.deadlineAt) return false;
    if (this.phase !== "waiting") return this.isWanted;
    this.phase = "connecting";
    this.deadlineAt = now + REACH_WITHIN_MS;
    return false;
  }

  /** Return the error if the server was not reached in time, else null. A page that did not run has more time. */
  judgeReach(now, isLate) {
    if (now < this.#reachBy) return null;
    this.#reachBy = now + this.#reachWithinMs;
    if (isLate) return null;
    const why = this.#lastFailure && ` (last: ${this.#lastFailure})`;
    const advice = "check its address and scheme, and that it allows this page's origin (midstream serve --allow-origin)";
    return connectionLostError(`no connection to the server within ${this.#reachWithinMs / 1000} s${why}: ${advice}`);
  }

  end() {
    this.phase = "ended";
    this.deadlineAt = this.#reachBy = Infinity;
    this.isReconnecting = false;
    this.trouble = null;
  }
}
