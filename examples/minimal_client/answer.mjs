/** Fold the events of a `Stream` into the text of an answer. `shown` has the pieces of each response by its number. */

const GO_ON = "[The turn was interrupted here. Go on where you stopped.]";

const between = (before, after) => (!before || !after || /\s$/.test(before) || /^\s/.test(after) ? "" : "\n\n");

export function textOf(shown) {
  const pieces = Object.values(shown).flat();
  return pieces.reduce((text, piece) => text + between(text, piece) + piece, "");
}

/** Return `shown` after one more event. A call within a response begins another piece. */
export function show(shown, { record, gone, session }, turn) {
  if (gone) return {};
  if (session) return session.turns === turn ? ofSession(session) : {};
  const { type, response } = record;
  if (type === "attempt_started") return { ...shown, [response]: [""] };
  if (type === "response_completed") return { ...shown, [response]: piecesOf(record.body) };
  if (type !== "delta") return shown;
  const pieces = shown[response] ?? [""];
  if (record.call) return { ...shown, [response]: [...pieces, ""] };
  if (record.kind !== "text") return shown;
  return { ...shown, [response]: [...pieces.slice(0, -1), pieces.at(-1) + record.text] };
}

function ofSession({ history, running }) {
  const isMessage = (entry) => entry.type === "user" && entry.parts[0]?.text !== GO_ON;
  const steps = history.slice(history.findLastIndex(isMessage) + 1).filter((entry) => entry.type === "step");
  const shown = { 0: steps.flatMap((step) => piecesOf(step.response)) };
  return running?.output ? { ...shown, [running.response]: piecesOf(running.output) } : shown;
}

function piecesOf({ parts }) {
  const pieces = [""];
  for (const part of parts) {
    if (part.type === "upstream_call") pieces.push("");
    if (part.type === "text") pieces.push(pieces.pop() + part.text);
  }
  return pieces;
}
