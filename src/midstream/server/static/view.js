/**
 * The display of turns. Content of models and tools becomes text nodes only, and is never run.
 *
 * A turn is drawn once and then changed in place. So open details and selected text stay.
 */

import { QuestionCard } from "./question.js";
import { visible } from "./visible.js";

const SVG = "http://www.w3.org/2000/svg";
const BAND_WIDTH = 1000;
/** Length of the preview of arguments in the row of a tool call. */
const PREVIEW_CHARS = 120;

const STATE_LABELS = {
  planned: "planned",
  asking: "waiting for you",
  running: "running",
  doubt: "in doubt",
  ok: "ok",
  error: "error",
  unknown: "outcome unknown",
  cancelled: "not run",
  denied: "denied",
  allowed: "allowed, elsewhere",
};

/** Labels of statuses that differ from those of the API and of `midstream sessions`. */
const STATUS_LABELS = { waiting: "waiting for you" };

export function statusLabel(status) {
  return STATUS_LABELS[status] ?? status;
}

export const find = (id) => document.getElementById(id);

/** Return a new element with a class, text and children. */
export function element(name, className = "", ...children) {
  const created = document.createElement(name);
  if (className) created.className = className;
  created.append(...children);
  return created;
}

/** Format a duration: "40 ms", "0.4 s", "12 s", "3 min 5 s". */
function duration(seconds) {
  if (seconds < 0.1) return `${Math.max(1, Math.round(seconds * 1000))} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}

export function textOf(message) {
  return (message?.parts ?? []).map((part) => part.text ?? `[${part.name ?? part.media_type}]`).join("\n");
}

/**
 * One turn: the message, the responses, the status.
 *
 * `actions` has the actions of a person: `answer(session, question, choice, more)`, with the session "" for the displayed
 * one, and `resume(turn)`. `whenStored()` resolves when the answers so far are stored in this browser.
 */
export class TurnView {
  #message = element("div", "message");
  #responses = element("div", "responses");
  #responseViews = new Map();
  #foot = element("footer", "foot");
  #band = new Band();
  #status = element("span", "turn-status");
  #resume = element("button", "quiet resume", "Resume");
  #actions;

  constructor(number, actions) {
    this.#actions = actions;
    this.root = element("article", "turn", this.#message, this.#responses, this.#foot);
    this.root.dataset.turn = number;
    this.#message.dir = "auto";
    this.#resume.type = "button";
    this.#resume.title = "Continue this turn where it stopped";
    this.#resume.addEventListener("click", () => actions.resume(number));
    this.#foot.append(this.#band.root, element("div", "ending", this.#status, this.#resume));
    this.#foot.hidden = true;
  }

  /**
   * Draw `turn` at the time `now` (seconds of the server's clock). `cuts` are the lost connections of this page. `canResume`
   * is true if the turn can be resumed or continued, `isLost` if the server no longer has the session.
   */
  show(turn, cuts, now, canResume, isLost = false) {
    this.#resume.hidden = !canResume;
    setText(this.#resume, turn.status ? "Resume" : "Continue");
    setText(this.#message, textOf(turn.message));
    this.#message.hidden = turn.message === null;
    this.root.dataset.status = statusOf(turn, isLost);
    for (const [number, response] of turn.responses) {
      if (!this.#responseViews.has(number)) {
        const created = new ResponseView(this.#actions);
        this.#responseViews.set(number, created);
        this.#responses.append(created.root);
      }
      this.#responseViews.get(number).show(response, !turn.status && !isLost && number === turn.responses.size, now);
    }
    const isTimed = turn.startedAt !== null;
    this.#foot.hidden = !turn.status && !isTimed;
    this.#band.root.toggleAttribute("hidden", !isTimed);
    if (isTimed) this.#band.show(turn, cuts, turn.endedAt ?? Math.max(now, turn.startedAt));
    setText(this.#status, footOf(turn, cuts, now, isLost));
  }
}

function statusOf(turn, isLost) {
  if (turn.status || isLost) return turn.status || "lost";
  return turn.isCancelling ? "cancelling" : "running";
}

function footOf(turn, cuts, now, isLost) {
  if (isLost && !turn.status) return "Lost with its session";
  const status = statusLabel(turn.status || activityOf(turn));
  const parts = [status.charAt(0).toUpperCase() + status.slice(1)];
  if (turn.startedAt !== null)
    parts[0] += ` ${turn.status ? "in" : "for"} ${duration((turn.endedAt ?? now) - turn.startedAt)}`;
  if (turn.problem) parts[0] += `: ${turn.problem}`;
  const every = [...turn.responses.values()].flatMap((response) => [...response.calls.values()]);
  const calls = every.filter((call) => !call.isElsewhere).length;
  const repeats = turn.marks.filter((mark) => mark.kind === "repeat").length;
  const owners = turn.marks.filter((mark) => mark.kind === "owner").length;
  if (calls) parts.push(countOf(calls, "tool call"));
  const survived = cuts.filter((cut) => cut.to !== null).length;
  if (survived) parts.push(`${countOf(survived, "cut")} survived`);
  if (owners) parts.push(`${countOf(owners, "server restart")} survived`);
  const resumed = turn.marks.filter((mark) => mark.kind === "resume").length;
  if (resumed) parts.push(resumed === 1 ? "resumed" : `resumed ${resumed} times`);
  if (repeats) parts.push(`${countOf(repeats, "response", "responses")} requested again`);
  return parts.join(" \u00b7 ");
}

function activityOf(turn) {
  if (turn.isCancelling) return "cancelling";
  const calls = [...turn.responses.values()].flatMap((response) => [...response.calls.values()]);
  const isAsking = (call) => call.question || (call.work && call.work.transcript.asking.length > 0);
  return calls.some(isAsking) ? "waiting" : "running";
}

function countOf(count, one, many = `${one}s`) {
  return `${count} ${count === 1 ? one : many}`;
}

/** One response: thinking, text, tool calls. */
class ResponseView {
  #actions;
  #notes = element("div", "notes");
  #again = element("p", "again");
  #parts = element("div", "parts");
  #partViews = [];
  #calls = element("ul", "calls");
  #callViews = new Map();
  #attempt = 0;

  constructor(actions) {
    this.#actions = actions;
    this.root = element("section", "response", this.#notes, this.#again, this.#parts, this.#calls);
    this.#again.hidden = this.#calls.hidden = this.#notes.hidden = true;
  }

  show(response, isLast, now) {
    const isWaiting = isLast && !response.isWhole;
    this.root.classList.toggle("is-waiting", isWaiting && !response.parts.some((part) => part?.text));
    this.root.classList.toggle("is-streaming", isWaiting);
    this.#notes.hidden = response.notes.length === 0;
    for (const note of response.notes.slice(this.#notes.childElementCount))
      this.#notes.append(element("p", "note", visible(note)));
    this.#again.hidden = response.attempt <= 1 && !response.failure;
    setText(this.#again, attemptNoteOf(response));
    this.#showParts(response);
    this.#calls.hidden = response.calls.size === 0;
    for (const [id, call] of response.calls) {
      if (!this.#callViews.has(id)) {
        const created = new CallView(call, this.#actions);
        this.#callViews.set(id, created);
        this.#calls.append(created.root);
      }
      this.#callViews.get(id).show(call, now);
    }
  }

  #showParts(response) {
    const parts = response.parts.filter((part) => part?.text || part?.kind === "elsewhere");
    const isOther = parts.length < this.#partViews.length || response.attempt !== this.#attempt;
    if (isOther || this.#partViews.some((shown, index) => shown.kind !== parts[index].kind)) {
      this.#parts.replaceChildren();
      this.#partViews = [];
      this.#attempt = response.attempt;
    }
    for (const part of parts.slice(this.#partViews.length)) {
      const created = partView(part.kind);
      this.#partViews.push(created);
      this.#parts.append(created.root);
    }
    parts.forEach((part, index) => {
      const shown = this.#partViews[index];
      if (part.kind === "elsewhere") showUpstreamCall(shown, part);
      else setText(shown.text, part.text);
    });
  }
}

function attemptNoteOf(response) {
  if (response.failure) return `The model did not answer (${response.failure.code}).`;
  if (response.voided === 0) return `The previous attempt returned nothing; this is attempt ${response.attempt}.`;
  return `The model was cut off before this response was whole. Its text is void; this is attempt ${response.attempt}.`;
}

function partView(kind) {
  if (kind === "elsewhere") return upstreamCallView();
  const text = element("div", "text");
  text.dir = "auto";
  if (kind !== "thinking") return { kind, text, root: text };
  const root = element("details", "thinking", element("summary", "", "Thinking"), text);
  return { kind, text, root };
}

/** Return the row of a tool call that the upstream runs itself. It has no question. */
function upstreamCallView() {
  const [name, preview] = [element("bdi", "name"), element("bdi", "preview")];
  const [given, result, state] = [element("pre"), element("pre"), element("span", "state")];
  const row = element("summary", "", element("span", "dot"), name, preview, state);
  const body = element("div", "body", element("h4", "", "Arguments"), given, element("h4", "", "Result"), result);
  const root = element("div", "call elsewhere", element("details", "", row, body));
  return { kind: "elsewhere", root, name, preview, given, result, state };
}

function showUpstreamCall(shown, part) {
  shown.root.dataset.state = part.state;
  setText(shown.name, visible(part.name));
  setText(shown.preview, visible(part.arguments).slice(0, PREVIEW_CHARS));
  setText(shown.given, visible(indented(part.arguments)));
  setText(shown.result, visible(indented(part.text)));
  setText(shown.state, `${STATE_LABELS[part.state] ?? part.state}, elsewhere`);
}

/**
 * A tool call: a row with its state, and its arguments and result when it is open. Always visible are its progress, its
 * question to a person, and the work of its sub-agent.
 */
class CallView {
  #state = element("span", "state");
  #time = element("span", "time");
  #argumentsLabel = element("h4", "", "Arguments");
  #arguments = element("pre", "", "");
  #result = element("pre", "", "");
  #resultLabel = element("h4", "", "Result");
  #late = element("pre", "", "");
  #lateLabel = element("h4", "", "Received late, after the call was closed");
  #progress = element("p", "progress", "");
  #decided = element("p", "decided", "");
  #work = element("div", "work");
  #workViews = new Map();
  #workActions = null;
  #actions;
  #question = null;
  #card = null;

  constructor(call, actions) {
    this.#actions = actions;
    const name = element("bdi", "name", visible(call.name));
    const preview = element("bdi", "preview", visible(call.arguments).slice(0, PREVIEW_CHARS));
    const row = element("summary", "", element("span", "dot"), name, preview, this.#time, this.#state);
    const body = element(
      "div",
      "body",
      this.#argumentsLabel,
      this.#arguments,
      this.#resultLabel,
      this.#result,
      this.#lateLabel,
      this.#late,
    );
    this.root = element("li", "call", element("details", "", row, body), this.#progress, this.#decided, this.#work);
    this.root.dataset.call = call.id;
    this.#progress.dir = this.#decided.dir = "auto";
  }

  show(call, now) {
    this.root.dataset.state = call.state;
    setText(this.#state, `${STATE_LABELS[call.state] ?? call.state}${call.run > 1 ? `, run ${call.run}` : ""}`);
    setText(this.#time, call.startedAt && call.endedAt ? duration(call.endedAt - call.startedAt) : "");
    setText(this.#argumentsLabel, call.edited === null ? "Arguments" : "Arguments, as a person changed them");
    setText(this.#arguments, visible(indented(call.edited ?? call.arguments)));
    this.#resultLabel.hidden = this.#result.hidden = call.content === null;
    if (call.content !== null) setText(this.#result, visible(indented(call.content)));
    this.#lateLabel.hidden = this.#late.hidden = call.late === null;
    if (call.late !== null) setText(this.#late, visible(indented(call.late.content)));
    this.#progress.hidden = call.state !== "running" || !call.progress;
    setText(this.#progress, visible(call.progress));
    this.#decided.hidden = call.answer === null;
    setText(this.#decided, decisionOf(call));
    this.#showQuestion(call);
    this.#showWork(call, now);
  }

  #showQuestion(call) {
    if (call.question === this.#question) return;
    this.#card?.root.remove();
    this.#question = call.question;
    this.#card = null;
    if (call.question === null) return;
    const { question } = call;
    const answer = (choice, more) => this.#actions.answer("", question, choice, more);
    this.#card = new QuestionCard(call, question, answer, this.#actions.whenStored);
    this.root.insertBefore(this.#card.root, this.#work);
  }

  #showWork(call, now) {
    this.#work.hidden = call.work === null;
    if (call.work === null) return;
    const { session, transcript } = call.work;
    this.#workActions ??= {
      answer: (inner, ...more) => this.#actions.answer(inner || session, ...more),
      whenStored: this.#actions.whenStored,
      resume: () => {}, // a sub-agent continues with the turn that called it
    };
    for (const [number, turn] of transcript.turns) {
      if (!this.#workViews.has(number)) {
        const created = new TurnView(number, this.#workActions);
        this.#workViews.set(number, created);
        this.#work.append(created.root);
      }
      this.#workViews.get(number).show(turn, [], now, false);
    }
  }
}

const DECISIONS = {
  allow: "Allowed",
  deny: "Denied",
  respond: "Answered",
  happened: "Confirmed to have happened",
  rerun: "Sent to run again",
  skip: "Skipped",
};

function decisionOf({ answer }) {
  if (answer === null) return "";
  const by = answer.by ? ` by ${visible(answer.by)}` : "";
  return `${DECISIONS[answer.choice] ?? answer.choice}${by}${answer.text ? `: ${visible(answer.text)}` : ""}`;
}

/**
 * Return JSON with indentation, and any other text as it is. JSON that JavaScript cannot represent exactly (long numbers,
 * repeated names) stays as it is too: a person must see the exact text before a decision.
 */
export function indented(text) {
  try {
    const value = JSON.parse(text);
    const isWhole = JSON.stringify(value).replace(/\s/g, "") === text.replace(/\s/g, "");
    return typeof value === "object" && isWhole ? JSON.stringify(value, null, 2) : text;
  } catch {
    return text;
  }
}

/**
 * The time of a turn as a band. The upper part has the work of the server: model, tools, takeovers by another server. The
 * lower part has the lost connections of this page.
 */
class Band {
  constructor() {
    this.root = document.createElementNS(SVG, "svg");
    this.root.setAttribute("class", "band");
    this.root.setAttribute("viewBox", `0 0 ${BAND_WIDTH} 12`);
    this.root.setAttribute("preserveAspectRatio", "none");
    this.root.setAttribute("role", "img");
  }

  show(turn, cuts, end) {
    const start = turn.startedAt;
    const scale = BAND_WIDTH / Math.max(end - start, 0.05);
    const at = (seconds) => Math.min(BAND_WIDTH, Math.max(0, (seconds - start) * scale));
    const bars = [bar("base", 0, BAND_WIDTH, 3, 1, "waiting")];
    for (const { from, to, isVoid } of turn.spans) {
      const label = isVoid ? "model, cut off" : "model";
      bars.push(
        bar(isVoid ? "model void" : "model", at(from), at(to ?? end), 0, 7, `${label}: ${duration((to ?? end) - from)}`),
      );
    }
    for (const response of turn.responses.values()) {
      for (const { name, state, startedAt, endedAt } of response.calls.values()) {
        if (!startedAt) continue;
        const label = `${visible(name)}: ${duration((endedAt ?? end) - startedAt)}, ${state}`;
        bars.push(bar(`tool ${state}`, at(startedAt), at(endedAt ?? end), 0, 7, label));
      }
    }
    for (const { from, to } of cuts) {
      bars.push(bar("cut", at(from), at(to ?? end), 9, 3, `this page was cut off: ${duration((to ?? end) - from)}`));
    }
    for (const mark of turn.marks) {
      if (mark.kind === "owner")
        bars.push(bar("owner", at(mark.at) - 2, at(mark.at) + 2, 0, 7, "another server went on"));
      if (mark.kind === "resume") bars.push(bar("owner", at(mark.at) - 2, at(mark.at) + 2, 0, 7, "resumed"));
      if (mark.kind === "cancel") bars.push(bar("stop", at(mark.at) - 2, at(mark.at) + 2, 0, 7, "stopped"));
    }
    this.root.replaceChildren(...bars);
    this.root.setAttribute("aria-label", `How the time of turn ${turn.number} passed`);
  }
}

function bar(kind, from, to, y, height, label) {
  const created = document.createElementNS(SVG, "rect");
  const title = document.createElementNS(SVG, "title");
  title.textContent = label;
  created.append(title);
  const place = { class: kind, x: from, y, width: Math.max(to - from, 3), height };
  for (const [name, value] of Object.entries(place)) created.setAttribute(name, String(value));
  return created;
}

/** Change the text node of an element. Added text is appended, so that a selection stays. */
function setText(target, text) {
  const node = target.firstChild;
  if (node === null) {
    if (text) target.append(text);
  } else if (node.data !== text) {
    if (text.startsWith(node.data)) node.appendData(text.slice(node.data.length));
    else node.data = text;
  }
}
