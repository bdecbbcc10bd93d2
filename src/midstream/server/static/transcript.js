/**
 * The records of a session, folded into what a person reads. Pure: no page, no clock.
 *
 * A `Transcript` is fed events in order (`apply`) or begins from a server's snapshot (`fromSnapshot`). It keeps
 * the words of one attempt per response: when the model is asked again, what the cut attempt said is void and is
 * counted in `attempts`, so that a reader can be told.
 */

import { isOpening } from "./client/answer.js";
import { parseEventId } from "./client/stream.js";

/** What a call is doing, in the order of its life. */
export const CALL_STATES = [
  "planned",
  "asking",
  "running",
  "doubt",
  "ok",
  "error",
  "unknown",
  "cancelled",
  "denied",
  "allowed",
];
/** The answers each kind of question takes. */
const CHOICES = { approval: ["allow", "deny"], question: ["respond"], doubt: ["happened", "rerun", "skip"] };
/** Turns that ended so can go on, but for one code. */
const LEFT = new Set(["interrupted", "failed"]);
const NEVER_AGAIN = "model_calls_max";

export class Transcript {
  constructor(cursor = "0-0") {
    this.cursor = cursor;
    /** Turn number -> turn, in order. */
    this.turns = new Map();
    /** Whether it tells of finished turns neither times nor streams. */
    this.isPartial = false;
    /** Number -> message that waits for the running turn to end: {number, message, at, stream}, in order. */
    this.queue = new Map();
  }

  /** Begin from a server's snapshot. It tells words and outcomes, and of finished turns neither times nor attempts. */
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
    if (snapshot.running) transcript.#takeUp(snapshot.running);
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

  /** The turn that somebody may resume, or null: the last one, where it was interrupted or failed. */
  get resumable() {
    const last = [...this.turns.values()].at(-1);
    return last && LEFT.has(last.status) && last.code !== NEVER_AGAIN ? last : null;
  }

  /** The calls that wait for a person, also those of sub-agents: [{session, call}], `session` "" for this one. */
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

  /** Whether a message of this stream is known here, in a turn or in the queue. */
  hasStream(key) {
    return [...this.turns.values(), ...this.queue.values()].some((each) => each.stream === key);
  }

  /** Apply one event and return the turn it changed, or null. An event applied before changes nothing. */
  apply({ id, record }) {
    const at = parseEventId(id);
    const known = parseEventId(this.cursor);
    if (at.position <= known.position) return null;
    this.cursor = id;
    return this.applyRecord(record);
  }

  /** Fold one record; `apply` without its place. */
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
        Object.assign(responseOf(turn, record.response), {
          failure: { code: record.code, message: record.message },
        });
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
        askedAbout(callOf(turn, record), record);
        break;
      case "question_answered":
        answered(callOf(turn, record), record);
        break;
      case "question_closed":
        closed(callOf(turn, record), record);
        break;
      case "child_delta":
        tellWork(callOf(turn, record), record);
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
        break; // committed steps change nothing to see; newer records wait for a newer page
    }
    return turn;
  }

  #turn(number) {
    if (!this.turns.has(number)) {
      const turn = {
        number,
        message: null,
        stream: "",
        responses: new Map(),
        marks: [],
        spans: [],
        status: "",
      };
      this.turns.set(number, {
        ...turn,
        code: "",
        problem: "",
        isCancelling: false,
        startedAt: null,
        endedAt: null,
      });
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
    // Whatever an earlier attempt said of this response is void.
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
      response.parts[record.part] = ranElsewhere(record.call);
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

  #takeUp(running) {
    const turn = this.#turn(running.turn);
    turn.status = "";
    const response = responseOf(turn, running.response);
    for (const question of running.questions ?? []) askedAbout(callOf(turn, question), question);
    if (running.calls?.length) {
      complete(turn, { response: running.response, attempt: 1, body: running.said, at: null });
      for (const { call, status, started_at: startedAt = null, result, question } of running.calls) {
        const known = response.calls.get(call.id);
        if (status === "running") Object.assign(known, { state: "running", startedAt });
        if (status === "in doubt") known.state = "doubt";
        if (question) {
          const place = { turn: running.turn, response: running.response, call_id: call.id };
          Object.assign(known, { state: "asking", question: asked({ ...question, ...place }) });
        }
        if (result) endCall(turn, { response: running.response, result, at: null });
      }
    } else {
      const parts = (running.said?.parts ?? []).map(shownPart);
      Object.assign(response, { attempt: running.attempt ?? 0, parts });
    }
  }

  /** Begin where a journal does that was pruned. */
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
    const response = {
      number,
      attempt: 0,
      voided: 0,
      parts: [],
      calls: new Map(),
      notes: [],
      failure: null,
      isWhole: false,
    };
    turn.responses.set(number, { ...response, startedAt: null, endedAt: null, notBefore: 0, finish: "" });
  }
  return turn.responses.get(number);
}

function shownPart(part) {
  return part.type === "upstream_call" ? ranElsewhere(part) : { kind: part.type, text: part.text };
}

/** A tool that the upstream ran itself: told among the words, where it started. `text` is what it read. */
function ranElsewhere({ name = "", arguments: given = "{}", content = "", outcome = null }) {
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
    edited: null, // what a person made of the arguments
    question: null, // what a person is being asked about it
    answer: null, // what a person decided last
    isElsewhere: false, // an upstream's agent wants to run it, in the middle of its answer
    work: null, // {session, transcript} of the sub-agent whose work it is
    late: null, // what it gave after it was closed as unknown
  };
}

/** A question as an answer must name it, with what to show of it. */
function asked({ turn, response, call_id, kind, digest, text = "", expires_at: expiresAt = 0, is_fixed: isFixed = false }) {
  return { turn, response, call_id, kind, digest, text, expiresAt, isFixed, choices: CHOICES[kind] ?? [] };
}

/** Let a call ask; what an upstream's agent wants leave for is no call of the response, and its record has all of it. */
function askedAbout(call, record) {
  if (record.attempt) Object.assign(call, { name: record.name, arguments: record.arguments, isElsewhere: true });
  Object.assign(call, { state: "asking", question: asked(record) });
}

function closed(call, { why }) {
  Object.assign(call, { state: why === "expired" ? "denied" : "cancelled", question: null });
}

function answered(call, { choice, text = "", by = "", kind }) {
  call.answer = { choice, text, by };
  call.question = null;
  if (call.isElsewhere) {
    call.state = choice === "allow" ? "allowed" : "denied";
    return;
  }
  if (call.state === "asking") call.state = kind === "doubt" ? "doubt" : "planned";
}

/** Fold what the session of a sub-agent did; of nested ones its own fold does the same. */
function tellWork(call, { child, record }) {
  call.work ??= { session: child, transcript: new Transcript() };
  call.work.transcript.applyRecord(record);
}

function toolNotes({ added = [], removed = [], unreachable = [] }) {
  const told = [
    ["Tools added: ", added],
    ["Tools gone: ", removed],
    ["Tool servers that cannot be reached: ", unreachable],
  ].filter(([, names]) => names.length > 0);
  if (told.length === 0) return ["All tools can be reached again."];
  return told.map(([what, names]) => `${what}${names.join(", ")}.`);
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

/** Say when the model stopped speaking, and whether in vain. */
function endSpan(turn, at, isVoid) {
  const span = turn.spans.at(-1);
  if (span && span.to === null) Object.assign(span, { to: Math.max(at, span.from), isVoid });
}

function mark(turn, kind, at, note = "") {
  turn.marks.push({ kind, at, note });
}
