/**
 * Fold the events of a session into the text of its answer: each word once, also after interrupted attempts.
 *
 * When an attempt begins, the text of the earlier attempt at the same response is void. It stays displayed until the new
 * attempt differs. Repeated text adds nothing, and the first character that differs replaces the void text. Python's
 * `midstream.protocol.answer_text` has the same rule for the same records. This module is pure: no page, no clock.
 */

import { MidstreamError } from "./errors.js";

/** Separates the texts of two responses if the first does not end in white space. */
const PARAGRAPH = "\n\n";
/** The message that the model receives when a turn is resumed. It is not from a person. */
const GO_ON = "[The turn was interrupted here. Go on where you stopped.]";

/** Return whether this entry of a history begins a turn. */
export const isOpening = (entry) => entry.type === "user" && entry.parts[0]?.text !== GO_ON;

/**
 * A turn ended without a whole answer. `status` is how it ended, `cause` the code of the error that ended it, or "". `turn`
 * is its number, or 0 if it has none.
 */
export class TurnFailedError extends MidstreamError {
  constructor(message, { status = "failed", cause = "", transcript = "", turn = 0 } = {}) {
    super("turn_failed", message);
    this.name = "TurnFailedError";
    this.status = status;
    this.cause = cause;
    this.transcript = transcript;
    this.turn = turn;
  }

  /** Whether `client.resume` can continue the turn. */
  get isResumable() {
    return this.turn > 0 && (this.status === "failed" || this.status === "interrupted");
  }
}

/** The text of the current turn's answer, event by event. */
export class AnswerText {
  #settled = ""; // the text of complete responses
  #begun = ""; // the displayed text of the current response, void text included
  #repeated = null; // the number of void characters that the new attempt has repeated; null if no text is void
  #isAfterCall = false;

  /** Fold one event; return the added `text`, whether it `replaces` the displayed text, and the whole `transcript`. */
  take(event) {
    if (event.type === "record") return this.#takeRecord(event.record);
    if (event.type === "snapshot") return this.#restart(event.session, event.turn ?? null);
    if (event.type !== "gone") return this.#now();
    this.#settled = "";
    return this.#replace("");
  }

  #now(text = "", replaces = false) {
    return { text, replaces, transcript: this.#settled + this.#begun };
  }

  #takeRecord(record) {
    switch (record.type) {
      case "message_accepted":
      case "transcript_accepted":
        this.#begin();
        break;
      case "attempt_started":
        this.#isAfterCall = false;
        if (this.#begun) this.#repeated = 0;
        break;
      case "delta":
        if (record.call) this.#isAfterCall = true;
        else if (record.kind === "text" && record.text) return this.#add(this.#lead(record.text) + record.text);
        break;
      case "response_completed":
        return this.#complete(record.body);
      case "turn_ended":
        if (this.#repeated !== null) return this.#replace(this.#begun.slice(0, this.#repeated));
        break;
      default:
        break;
    }
    return this.#now();
  }

  #begin() {
    this.#settled = this.#begun = "";
    this.#repeated = null;
    this.#isAfterCall = false;
  }

  /** Continue from a snapshot of the session. Only the text of `turn` counts; null accepts every turn. */
  #restart({ turns = 0, history = [], running = null }, turn) {
    this.#begin();
    if (turn !== null && turn !== turns) return this.#now("", true);
    for (const entry of history) {
      if (isOpening(entry)) this.#begin();
      else if (entry.type !== "user") this.#complete(entry.response);
    }
    if (running?.output) this.#begun = this.#textOf(running.output);
    return this.#now(this.#settled + this.#begun, true);
  }

  #add(text) {
    this.#isAfterCall = false;
    if (this.#repeated === null) {
      this.#begun += text;
      return this.#now(text);
    }
    const left = this.#begun.length - this.#repeated;
    if (!this.#begun.startsWith(text.slice(0, left), this.#repeated))
      return this.#replace(this.#begun.slice(0, this.#repeated) + text);
    this.#repeated += Math.min(left, text.length);
    if (text.length < left) return this.#now();
    this.#repeated = null;
    return text.length > left ? this.#add(text.slice(left)) : this.#now();
  }

  /** Replace the text of the current response. */
  #replace(text) {
    this.#begun = text;
    this.#repeated = null;
    return this.#now(text, true);
  }

  /** Take the text of a complete response. */
  #complete(response) {
    const whole = this.#textOf(response);
    this.#repeated = null;
    const settled = whole.startsWith(this.#begun) ? this.#add(whole.slice(this.#begun.length)) : this.#replace(whole);
    this.#settled += this.#begun;
    this.#begun = "";
    this.#isAfterCall = false;
    return settled;
  }

  #textOf({ parts = [] }) {
    let text = "";
    let isAfterCall = false;
    for (const part of parts) {
      if (part.type === "upstream_call") isAfterCall = true;
      if (part.type !== "text" || !part.text) continue;
      if (!text) text = between(this.#settled, part.text);
      else if (isAfterCall) text += between(text, part.text);
      text += part.text;
      isAfterCall = false;
    }
    return text;
  }

  /** Return the separator between the text so far and the next text. */
  #lead(text) {
    const before = this.#repeated === null ? this.#begun : this.#begun.slice(0, this.#repeated);
    if (!before) return between(this.#settled, text);
    return this.#isAfterCall ? between(before, text) : "";
  }
}

/** The status of a turn with a whole answer. */
const COMPLETED = "completed";

/** Return the error of the turn whose stream ended with the event `last`; null if it completed or has not ended. */
export function failureOf(session, last) {
  const record = last?.type === "record" ? last.record : {};
  if (record.type === "turn_ended" && record.status !== COMPLETED) {
    const why = record.code ? `: ${record.message} [${record.code}]` : "";
    const message = `turn ${record.turn} of session '${session}' was not completed (${record.status})${why}`;
    return new TurnFailedError(message, { ...record, cause: record.code ?? "", transcript: last.transcript });
  }
  if (record.type === "message_withdrawn")
    return new TurnFailedError(`message ${record.number} of session '${session}' was withdrawn`, { status: "withdrawn" });
  if (last?.type === "snapshot" && last.session.last !== COMPLETED) {
    const { last: status, turns } = last.session;
    const message = `the turn of session '${session}' was not completed (${status})`;
    return new TurnFailedError(message, { status, transcript: last.transcript, turn: last.turn || turns });
  }
  return null;
}

/** Return the text of the answer whose stream ended with the event `last`; throw if its turn did not complete. */
export function completedText(session, last) {
  const failure = failureOf(session, last);
  if (failure !== null) throw failure;
  if (last?.type === "snapshot" || last?.record?.type === "turn_ended") return last.transcript;
  throw new MidstreamError("connection_lost", `the turn of session '${session}' continues without this client`, "later");
}

function between(before, after) {
  return !before || /\s$/.test(before) || /^\s/.test(after) ? "" : PARAGRAPH;
}
