/**
 * Fold the records of a session into its transcript. This module is pure: no page, no clock.
 *
 * A `Transcript` takes events in order (`apply`), or begins from a snapshot (`fromSnapshot`). It has the text of one attempt
 * for each response. When a new attempt begins, the text of the interrupted attempt is void, and `voided` counts it.
 */

import { isOpening } from "./client/answer.js";
import { parseEventId } from "./client/frames.js";

/** The choices of each kind of question. */
const CHOICES = { approval: ["allow", "deny"], question: ["respond"], doubt: ["happened", "rerun", "skip"] };
/** The statuses of turns that can be resumed, except with one code. */
const RESUMABLE_STATUSES = new Set(["interrupted", "failed"]);
const NOT_RESUMABLE_CODE = "model_calls_max";

export class Transcript {
  constructor(cursor = "0-0") {
    this.cursor = cursor;
    /** The turns by number, in order. */
    this.turns = new Map();
    /** Whether finished turns have no times and no streams. */
    this.isPartial = false;
    /** The queued messages by number, in order: {number, message, at, stream}. */
    this.queue = new Map();
  }

  /** Return the transcript of a snapshot. Its finished turns have text and outcomes, but no times and attempts. */
  static fromSnapshot(snapshot) {
    const transcript = new Transcript(snapshot.event_id);
    transcript.isPartial = true;
    let number = snapshot.turns - snapshot.history.filter(isOpening).length;
    let response = 0;
    for (const entry of snapshot.history) {
      if (isOpening(entry)) {
        number += 1;
        response = 0;
        transcript.#turn(number).message = { parts: entry.parts };
      } else if (entry.type !== "user") {
        response += 1;
        transcript.#step(number, response, entry);
      }
    }
    for (const turn of transcript.turns.values()) turn.status = "completed";
    if (snapshot.running) transcript.#restoreRunning(snapshot.running);
    else if (transcript.turns.has(snapshot.turns))
      transcript.turns.get(snapshot.turns).status = snapshot.last;
    for (const queued of snapshot.queue ?? []) transcript.queue.set(queued.number, { stream: "", ...queued });
    return transcript;
  }

  /** The turn that runs, or null. */
  get running() {
    const last = [...this.turns.values()].at(-1);
    return last && !last.status ? last : null;
  }

  /** The resumable turn, or null: the last one, if it was interrupted or failed. */
  get resumable() {
    const last = [...this.turns.values()].at(-1);
    return last && RESUMABLE_STATUSES.has(last.status) && last.code !== NOT_RESUMABLE_CODE ? last : null;
  }

  /** The calls that wait for a person, also those of sub-agents: [{session, call}]. `session` is "" for this session. */
  get asking() {
    const found = [];
    for (const response of this.running?.responses.values() ?? []) {
      for (const call of response.calls.values()) {
        if (call.question) found.push({ session: "", call });
        if (!call.work) continue;
        const { session: child, transcript } = call.work;
        found.push(...transcript.asking.map(({ session, call: of }) => ({ session: session || child, call: of })));
      }
    }
    return found;
  }

  /** Return whether a turn or the queue has a message of this stream. */
  hasStream(key) {
    return [...this.turns.values(), ...this.queue.values()].some((each) => each.stream === key);
  }

  /** Apply one event and return the changed turn, or null. A repeated event changes nothing. */
  apply({ id, record }) {
    const at = parseEventId(id);
    const known = parseEventId(this.cursor);
    if (at.position <= known.position) return null;
    this.cursor = id;
    return this.applyRecord(record);
  }

  /** Fold one record without an event id; return the changed turn, or null. */
  applyRecord(record) {
    if (record.type === "epoch_started") return this.#interrupted(record);
    if (record.type === "journal_pruned") return this.#begin(record.state);
    if (record.type === "message_queued") this.queue.set(record.number, { stream: "", ...record });
    if (record.type === "message_withdrawn") this.queue.delete(record.number);
    if (record.turn === undefined) return null;
    const turn = this.#turn(record.turn);
    switch (record.type) {
      case "message_accepted":
        Object.assign(turn, { message: record.message, startedAt: record.at, stream: record.stream ?? "" });
        this.queue.delete(record.queued);
        break;
      case "turn_resumed":
        Object.assign(turn, { status: "", code: "", problem: "", endedAt: null, isCancelling: false });
        if (record.stream) turn.stream = record.stream;
        mark(turn, "resume", record.at);
        break;
      case "attempt_started":
        this.#attempt(turn, record);
        break;
      case "delta":
        this.#delta(turn, record);
        break;
      case "attempt_failed":
        Object.assign(responseOf(turn, record.response), { failure: { code: record.code, message: record.message } });
        endSpan(turn, record.at, true);
        break;
      case "attempt_continued":
        mark(turn, "continued", record.at, `attempt ${record.attempt}`);
        endSpan(turn, record.at, false);
        turn.spans.push({ from: Math.max(record.at, record.not_before ?? 0), to: null, isVoid: false });
        Object.assign(responseOf(turn, record.response), { failure: null, notBefore: record.not_before ?? 0 });
        break;
      case "response_completed":
        complete(turn, record);
        endSpan(turn, record.at, false);
        break;
      case "history_compacted":
        responseOf(turn, record.response).notes.push("Longer than the model can read: it is shown no more of the older part.");
        break;
      case "tools_changed":
        lastResponse(turn).notes.push(...toolNotes(record));
        break;
      case "call_started":
        Object.assign(callOf(turn, record), {
          state: "running",
          run: record.run,
          startedAt: record.at,
          question: null,
          progress: "",
          edited: record.arguments ?? null,
        });
        break;
      case "call_progressed":
        callOf(turn, record).progress = record.text;
        break;
      case "call_in_doubt":
        callOf(turn, record).state = "doubt";
        break;
      case "question_asked":
        openQuestion(callOf(turn, record), record);
        break;
      case "question_answered":
        recordAnswer(callOf(turn, record), record);
        break;
      case "question_closed":
        closeQuestion(callOf(turn, record), record);
        break;
      case "child_delta":
        foldWork(callOf(turn, record), record);
        break;
      case "result_arrived_late":
        callOf(turn, record).late = record.result;
        break;
      case "call_ended":
        endCall(turn, record);
        break;
      case "outcome_damaged":
        Object.assign(callOf(turn, record), { state: "unknown", content: "The record of its outcome is damaged." });
        break;
      case "cancel_requested":
        turn.isCancelling = true;
        mark(turn, "cancel", record.at);
        break;
      case "turn_ended":
        endSpan(turn, record.at, true);
        Object.assign(turn, {
          status: record.status,
          code: record.code ?? "",
          problem: record.message ?? "",
          endedAt: record.at,
        });
        break;
      default:
        break; // a record with nothing to display, or of a newer server
    }
    return turn;
  }

  #turn(number) {
    if (!this.turns.has(number)) {
      const turn = { number, message: null, stream: "", responses: new Map(), marks: [], spans: [], status: "" };
      this.turns.set(number, { ...turn, code: "", problem: "", isCancelling: false, startedAt: null, endedAt: null });
    }
    return this.turns.get(number);
  }

  #attempt(turn, record) {
    const response = responseOf(turn, record.response);
    const had = response.parts.some((part) => part.text);
    const isRepeated = response.attempt > 0 && record.attempt !== response.attempt;
    if (isRepeated) {
      response.voided += had ? 1 : 0;
      mark(turn, "repeat", record.at, `attempt ${record.attempt}`);
    }
    endSpan(turn, record.at, true);
    turn.spans.push({ from: Math.max(record.at, record.not_before ?? 0), to: null, isVoid: false });
    // The text of earlier attempts at this response is void.
    Object.assign(response, {
      attempt: record.attempt,
      parts: [],
      failure: null,
      notBefore: record.not_before ?? 0,
      startedAt: record.at,
    });
  }

  #delta(turn, record) {
    const response = responseOf(turn, record.response);
    if (record.attempt !== response.attempt) return;
    if (record.call) {
      response.parts[record.part] = upstreamCall(record.call);
      return;
    }
    const part = (response.parts[record.part] ??= { kind: record.kind, text: "" });
    part.text += record.text;
  }

  #step(number, response, { response: body, results = [] }) {
    const turn = this.#turn(number);
    complete(turn, { response, attempt: 1, body, at: null });
    for (const result of results) endCall(turn, { response, result, at: null });
  }

  #restoreRunning(running) {
    const turn = this.#turn(running.turn);
    turn.status = "";
    const response = responseOf(turn, running.response);
    for (const question of running.questions ?? []) openQuestion(callOf(turn, question), question);
    if (running.calls?.length) {
      complete(turn, { response: running.response, attempt: 1, body: running.output, at: null });
      for (const { call, status, started_at: startedAt = null, result, question } of running.calls) {
        const known = response.calls.get(call.id);
        if (status === "running") Object.assign(known, { state: "running", startedAt });
        if (status === "in doubt") known.state = "doubt";
        if (question) {
          const place = { turn: running.turn, response: running.response, call_id: call.id };
          Object.assign(known, { state: "asking", question: questionOf({ ...question, ...place }) });
        }
        if (result) endCall(turn, { response: running.response, result, at: null });
      }
    } else {
      const parts = (running.output?.parts ?? []).map(shownPart);
      Object.assign(response, { attempt: running.attempt ?? 0, parts });
    }
  }

  /** Begin with the state at the beginning of a pruned journal. */
  #begin({ history, turns, turn, queue, last_turn: last }) {
    const running = turn.type === "idle" ? null : { turn: turn.turn, response: turn.response_no };
    const snapshot = { history: history.entries, turns, running, queue, last: last?.status ?? "" };
    const begun = Transcript.fromSnapshot({ ...snapshot, event_id: this.cursor });
    Object.assign(this, { turns: begun.turns, queue: begun.queue, isPartial: true });
    return null;
  }

  #interrupted(record) {
    const turn = this.running;
    if (turn === null) return null;
    mark(turn, "owner", record.at);
    endSpan(turn, record.at, true);
    return turn;
  }
}

function responseOf(turn, number) {
  if (!turn.responses.has(number)) {
    const response = { number, attempt: 0, voided: 0, parts: [], calls: new Map(), notes: [], failure: null, isWhole: false };
    turn.responses.set(number, { ...response, startedAt: null, endedAt: null, notBefore: 0, finish: "" });
  }
  return turn.responses.get(number);
}

function shownPart(part) {
  return part.type === "upstream_call" ? upstreamCall(part) : { kind: part.type, text: part.text };
}

/** Return the part of a tool call of the upstream. It is among the text, where the tool started. `text` is the result. */
function upstreamCall({ name = "", arguments: given = "{}", content = "", outcome = null }) {
  return { kind: "elsewhere", name: name || "a tool", arguments: given, text: content, state: outcome ?? "running" };
}

function complete(turn, record) {
  const response = responseOf(turn, record.response);
  const parts = record.body.parts.filter((part) => part.type !== "call");
  Object.assign(response, {
    attempt: record.attempt,
    parts: parts.map(shownPart),
    isWhole: true,
    finish: record.body.finish ?? "stop",
    model: record.body.model ?? "",
    usage: record.body.usage ?? null,
    failure: null,
    endedAt: record.at,
  });
  for (const part of record.body.parts) {
    if (part.type !== "call") continue;
    const call = { id: part.id, name: part.name, arguments: part.arguments ?? "{}", state: "planned" };
    response.calls.set(part.id, { ...newCall(), ...call });
  }
}

function newCall() {
  return {
    id: "",
    name: "",
    arguments: "",
    state: "planned",
    run: 0,
    startedAt: null,
    endedAt: null,
    content: null,
    progress: "",
    edited: null, // the arguments as a person changed them
    question: null, // the open question about the call
    answer: null, // the last answer of a person
    isElsewhere: false, // an upstream agent runs it, and requests permission in the middle of its answer
    work: null, // {session, transcript} of the sub-agent that does the work of the call
    late: null, // the result that came after the call was closed as unknown
  };
}

/** Return a question with its identity, which the answer repeats, and the fields to display. */
function questionOf({ turn, response, call_id, kind, digest, text = "", expires_at: expiresAt = 0, is_fixed: isFixed = false }) {
  return { turn, response, call_id, kind, digest, text, expiresAt, isFixed, choices: CHOICES[kind] ?? [] };
}

/** Add an open question to a call. A call of an upstream agent is not in the response: its fields come from the record. */
function openQuestion(call, record) {
  if (record.attempt) Object.assign(call, { name: record.name, arguments: record.arguments, isElsewhere: true });
  Object.assign(call, { state: "asking", question: questionOf(record) });
}

function closeQuestion(call, { why }) {
  Object.assign(call, { state: why === "expired" ? "denied" : "cancelled", question: null });
}

function recordAnswer(call, { choice, text = "", by = "", kind }) {
  call.answer = { choice, text, by };
  call.question = null;
  if (call.isElsewhere) {
    call.state = choice === "allow" ? "allowed" : "denied";
    return;
  }
  if (call.state === "asking") call.state = kind === "doubt" ? "doubt" : "planned";
}

/** Fold a record of a sub-agent's session. The transcript of the sub-agent folds nested ones. */
function foldWork(call, { child, record }) {
  call.work ??= { session: child, transcript: new Transcript() };
  call.work.transcript.applyRecord(record);
}

function toolNotes({ added = [], removed = [], unreachable = [] }) {
  const groups = [
    ["Tools added: ", added],
    ["Tools gone: ", removed],
    ["Tool servers that cannot be reached: ", unreachable],
  ].filter(([, names]) => names.length > 0);
  if (groups.length === 0) return ["All tools can be reached again."];
  return groups.map(([what, names]) => `${what}${names.join(", ")}.`);
}

function lastResponse(turn) {
  return [...turn.responses.values()].at(-1) ?? responseOf(turn, 1);
}

function callOf(turn, record) {
  const calls = responseOf(turn, record.response).calls;
  const id = record.call_id ?? record.result.call_id;
  if (!calls.has(id)) calls.set(id, { ...newCall(), id });
  return calls.get(id);
}

function endCall(turn, record) {
  const { outcome = "ok", content } = record.result;
  Object.assign(callOf(turn, record), { state: outcome, content, endedAt: record.at, question: null });
}

/** End the current span of the model; `isVoid` if its text is void. */
function endSpan(turn, at, isVoid) {
  const span = turn.spans.at(-1);
  if (span && span.to === null) Object.assign(span, { to: Math.max(at, span.from), isVoid });
}

function mark(turn, kind, at, note = "") {
  turn.marks.push({ kind, at, note });
}
