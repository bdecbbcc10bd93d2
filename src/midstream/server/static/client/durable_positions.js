/**
 * Promised events: events that are on the server's disk. They separate a power cut from a journal that was cut (STREAM-100).
 *
 * Event ids are `{epoch, position}`. `promised` is the newest received event that the server must not lose, or null.
 * `isOwned` is true for a stream of this client: no other session can have replaced its session.
 */

import { EVENTS_LOST, MidstreamError } from "./errors.js";
import { formatEventId } from "./frames.js";

/** Kinds of records that the server sends only after they are on its disk. */
const DURABLE = new Set([
  "answer_used", "cancel_requested", "command_accepted", "epoch_started", "message_accepted", "message_queued",
  "message_withdrawn", "question_answered", "stream_opened", "transcript_accepted", "turn_ended", "turn_resumed",
]);

/** Return whether this record survives a power cut. */
function isDurable(record) {
  return DURABLE.has(record.type) || (record.type === "call_started" && record.has_effects !== false);
}

/** Throw if a journal that ends with `newest` has lost the promised event. */
export function requireDurablePosition(promised, newest, isOwned) {
  if (promised === null) return;
  const isOlder = newest.epoch === promised.epoch && newest.position < promised.position;
  if (newest.epoch < promised.epoch || isOlder || (isOwned && newest.position < promised.position))
    throw lossError(promised, `ends with ${formatEventId(newest)}`);
}

/**
 * Return the newest known epoch, as `{epoch, beganAt}`, after the server has sent the beginning of `epoch`. `beganAt` is
 * null if the server sent none. Without a promised event nothing can be lost, so the server's value replaces the old one.
 * Throw if the epoch began at another time before: the store was set back, and the server continued (STREAM-105).
 */
export function newestEpochAfter(known, promised, epoch, beganAt) {
  if (beganAt === null) return known;
  if (known === null || promised === null || epoch > known.epoch) return { epoch, beganAt };
  if (epoch === known.epoch && beganAt !== known.beganAt) throw lossError(promised, `began epoch ${epoch} another time since`);
  return known;
}

/** Return the promised event after the event `at`. Throw if this event is in the place of a promised one. */
export function durablePositionAfter(promised, at, record, isOwned) {
  if (promised === null || !isOwned || at.position > promised.position) return isDurable(record) ? at : promised;
  if (at.epoch > promised.epoch || (at.position === promised.position && at.epoch !== promised.epoch))
    throw lossError(promised, `has ${formatEventId(at)} in its place`);
  return promised;
}

function lossError(promised, what) {
  const message = `the server had ${formatEventId(promised)} on its disk, and ${what}`;
  return new MidstreamError(EVENTS_LOST, `${message}. Its journal was cut, or replaced by an older copy`);
}
