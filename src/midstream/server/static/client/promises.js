/**
 * What a client knows to be on its server's disk: by this it tells a power cut from a journal that was cut (STREAM-100).
 *
 * Event ids are `{epoch, position}`; `promised` is the newest one that a server may not lose of those that were seen, or
 * null. `isOwned`: it came on a stream of the client's own, so that no other session can have taken this one's place.
 */

/** Kinds of records that are on the server's disk before anybody is told of them. */
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

/** Whether a power cut leaves this record where it is. */
export function isDurable(record) {
  return DURABLE.has(record.type) || (record.type === "call_started" && record.has_effects !== false);
}

/** Whether a server whose journal ends with `newest` has lost what it had promised. */
export function endsTooSoon(promised, newest, isOwned) {
  if (promised === null) return false;
  const isOlder = newest.epoch === promised.epoch && newest.position < promised.position;
  return newest.epoch < promised.epoch || isOlder || (isOwned && newest.position < promised.position);
}

/**
 * Return the newest epoch, as `{epoch, beganAt}`, that is known after the server has told when one began (null: it told
 * nothing). Where nothing was promised, nothing can be lost: then the server is believed.
 */
export function knownAfter(known, promised, epoch, beganAt) {
  if (beganAt === null) return known;
  const isNewer = known === null || promised === null || epoch > known.epoch;
  return isNewer ? { epoch, beganAt } : known;
}

/** Whether an epoch began at another time than it did before: the server was set back and went on (STREAM-105). */
export function beganAnother(known, promised, epoch, beganAt) {
  if (known === null || promised === null || beganAt === null) return false;
  return epoch === known.epoch && beganAt !== known.beganAt;
}

/** Whether an event stands where another one was promised to stay. */
export function standsInPlace(promised, at, isOwned) {
  if (promised === null || !isOwned || at.position > promised.position) return false;
  return at.epoch > promised.epoch || (at.position === promised.position && at.epoch !== promised.epoch);
}
