/**
 * Promised events: events that are on the server's disk. They separate a power cut from a journal that was cut (STREAM-100).
 *
 * Event ids are `{epoch, position}`. `promised` is the newest received event that the server must not lose, or null.
 * `isOwned` is true for a stream of this client: no other session can have replaced its session.
 */

/** Kinds of records that the server sends only after they are on its disk. */
const DURABLE = new Set([
  "answer_used",
  "cancel_requested",
  "command_accepted",
  "epoch_started",
  "message_accepted",
  "message_queued",
  "message_withdrawn",
  "question_answered",
  "stream_opened",
  "transcript_accepted",
  "turn_ended",
  "turn_resumed",
]);

/** Return whether this record survives a power cut. */
export function isDurable(record) {
  return DURABLE.has(record.type) || (record.type === "call_started" && record.has_effects !== false);
}

/** Return whether a journal that ends with `newest` has lost the promised event. */
export function hasLostPromised(promised, newest, isOwned) {
  if (promised === null) return false;
  const isOlder = newest.epoch === promised.epoch && newest.position < promised.position;
  return newest.epoch < promised.epoch || isOlder || (isOwned && newest.position < promised.position);
}

/**
 * Return the newest known epoch, as `{epoch, beganAt}`, after the server has sent the beginning of `epoch`. `beganAt` is
 * null if the server sent none. Without a promised event nothing can be lost, so the server's value replaces the old one.
 */
export function newestEpochAfter(known, promised, epoch, beganAt) {
  if (beganAt === null) return known;
  const isNewer = known === null || promised === null || epoch > known.epoch;
  return isNewer ? { epoch, beganAt } : known;
}

/** Return whether an epoch began at another time than before: the store was set back, and the server continued (STREAM-105). */
export function hasOtherBeginning(known, promised, epoch, beganAt) {
  if (known === null || promised === null || beganAt === null) return false;
  return epoch === known.epoch && beganAt !== known.beganAt;
}

/** Return whether an event is at the position of a promised event, or below it, under a newer epoch. */
export function isReplaced(promised, at, isOwned) {
  if (promised === null || !isOwned || at.position > promised.position) return false;
  return at.epoch > promised.epoch || (at.position === promised.position && at.epoch !== promised.epoch);
}
