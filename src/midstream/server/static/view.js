/**
 * Turns on the page. Content only ever becomes text nodes; whatever a model or a tool says is shown, never run.
 *
 * A turn is drawn once and then changed in place, so that what a reader has unfolded or selected stays.
 */

import { QuestionCard } from "./question.js";
import { visible } from "./visible.js";

const SVG = "http://www.w3.org/2000/svg";
const BAND_WIDTH = 1000;
/** A preview of arguments in a tool's row. */
const PREVIEW_CHARS = 120;

const STATE_WORDS = {
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

/** The statuses of a session and of a turn, as the API and `midstream sessions` have them; those for which people need more. */
const STATUS_WORDS = { waiting: "waiting for you" };

export function statusWord(status) {
  return STATUS_WORDS[status] ?? status;
}

/** Make an element with a class, text and children. */
export function element(name, className = "", ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

/** "40 ms", "0.4 s", "12 s", "3 min 5 s". */
export function duration(seconds) {
  if (seconds < 0.1) return `${Math.max(1, Math.round(seconds * 1000))} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}

export function textOf(message) {
  return (message?.parts ?? []).map((part) => part.text ?? `[${part.name ?? part.media_type}]`).join("\n");
}

/**
 * One turn: what was said, the responses, how it ended.
 *
 * `actions` is what a person can do: `answer(session, question, choice, more)`, where the session is "" for the one
 * that is shown, `stored()`, which resolves when the answers so far are stored here, and `resume(turn)`.
 */
export class TurnView {
  #said = element("div", "said");
  #responses = element("div", "responses");
  #responseViews = new Map();
  #foot = element("footer", "foot");
  #band = new Band();
  #words = element("span", "how");
  #resume = element("button", "quiet resume", "Resume");
  #actions;

  constructor(number, actions) {
    this.#actions = actions;
    this.root = element("article", "turn", this.#said, this.#responses, this.#foot);
    this.root.dataset.turn = number;
    this.#said.dir = "auto";
    this.#resume.type = "button";
    this.#resume.title = "Go on with this turn where it stopped";
    this.#resume.addEventListener("click", () => actions.resume(number));
    this.#foot.append(this.#band.root, element("div", "ending", this.#words, this.#resume));
    this.#foot.hidden = true;
  }

  /**
   * Draw `turn` as it is at `now` (seconds, the server's clock); `cuts` are this page's losses of the line, and
   * `canResume` says whether it can go on. `isLost`: the server has its session no longer.
   */
  show(turn, cuts, now, canResume, isLost = false) {
    this.#resume.hidden = !canResume;
    setText(this.#resume, turn.status ? "Resume" : "Continue");
    setText(this.#said, textOf(turn.message));
    this.#said.hidden = turn.message === null;
    this.root.dataset.status = statusOf(turn, isLost);
    for (const [number, response] of turn.responses) {
      if (!this.#responseViews.has(number)) {
        const made = new ResponseView(this.#actions);
        this.#responseViews.set(number, made);
        this.#responses.append(made.root);
      }
      this.#responseViews.get(number).show(response, !turn.status && !isLost && number === turn.responses.size, now);
    }
    const isTimed = turn.startedAt !== null;
    this.#foot.hidden = !turn.status && !isTimed;
    this.#band.root.toggleAttribute("hidden", !isTimed);
    if (isTimed) this.#band.show(turn, cuts, turn.endedAt ?? Math.max(now, turn.startedAt));
    setText(this.#words, footOf(turn, cuts, now, isLost));
  }
}

function statusOf(turn, isLost) {
  if (turn.status || isLost) return turn.status || "lost";
  return turn.isCancelling ? "cancelling" : "running";
}

function footOf(turn, cuts, now, isLost) {
  if (isLost && !turn.status) return "Lost with its session";
  const status = statusWord(turn.status || doing(turn));
  const words = [status.charAt(0).toUpperCase() + status.slice(1)];
  if (turn.startedAt !== null)
    words[0] += ` ${turn.status ? "in" : "for"} ${duration((turn.endedAt ?? now) - turn.startedAt)}`;
  if (turn.problem) words[0] += `: ${turn.problem}`;
  const every = [...turn.responses.values()].flatMap((response) => [...response.calls.values()]);
  const calls = every.filter((call) => !call.isElsewhere).length;
  const repeats = turn.marks.filter((mark) => mark.kind === "repeat").length;
  const owners = turn.marks.filter((mark) => mark.kind === "owner").length;
  if (calls) words.push(counted(calls, "tool call"));
  const survived = cuts.filter((cut) => cut.to !== null).length;
  if (survived) words.push(`${counted(survived, "cut")} survived`);
  if (owners) words.push(`${counted(owners, "server restart")} survived`);
  const resumed = turn.marks.filter((mark) => mark.kind === "resume").length;
  if (resumed) words.push(resumed === 1 ? "resumed" : `resumed ${resumed} times`);
  if (repeats) words.push(`${counted(repeats, "response", "responses")} asked again`);
  return words.join(" \u00b7 ");
}

function doing(turn) {
  if (turn.isCancelling) return "cancelling";
  const calls = [...turn.responses.values()].flatMap((response) => [...response.calls.values()]);
  const asks = (call) => call.question || (call.work && call.work.transcript.asking.length > 0);
  return calls.some(asks) ? "waiting" : "running";
}

function counted(count, one, many = `${one}s`) {
  return `${count} ${count === 1 ? one : many}`;
}

/** One response: thoughts, words, calls. */
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
    this.root.classList.toggle("is-speaking", isWaiting);
    this.#notes.hidden = response.notes.length === 0;
    for (const note of response.notes.slice(this.#notes.childElementCount))
      this.#notes.append(element("p", "note", visible(note)));
    this.#again.hidden = response.attempt <= 1 && !response.failure;
    setText(this.#again, againOf(response));
    this.#showParts(response);
    this.#calls.hidden = response.calls.size === 0;
    for (const [id, call] of response.calls) {
      if (!this.#callViews.has(id)) {
        const made = new CallView(call, this.#actions);
        this.#callViews.set(id, made);
        this.#calls.append(made.root);
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
      const made = partView(part.kind);
      this.#partViews.push(made);
      this.#parts.append(made.root);
    }
    parts.forEach((part, index) => {
      const shown = this.#partViews[index];
      if (part.kind === "elsewhere") showElsewhere(shown, part);
      else setText(shown.words, part.text);
    });
  }
}

function againOf(response) {
  if (response.failure) return `The model did not answer (${response.failure.code}).`;
  if (response.voided === 0) return `An earlier try gave nothing; this is try ${response.attempt}.`;
  return `The model was cut off before this response was whole. What it had said is void; this is try ${response.attempt}.`;
}

function partView(kind) {
  if (kind === "elsewhere") return elsewhereView();
  const words = element("div", "words");
  words.dir = "auto";
  if (kind !== "thinking") return { kind, words, root: words };
  const root = element("details", "thinking", element("summary", "", "Thinking"), words);
  return { kind, words, root };
}

/** A tool that the upstream ran itself: a row like a call's, with nothing to decide. */
function elsewhereView() {
  const [name, preview] = [element("bdi", "name"), element("bdi", "preview")];
  const [given, result, state] = [element("pre"), element("pre"), element("span", "state")];
  const row = element("summary", "", element("span", "dot"), name, preview, state);
  const body = element(
    "div",
    "body",
    element("h4", "", "Arguments"),
    given,
    element("h4", "", "Result"),
    result,
  );
  const root = element("div", "call elsewhere", element("details", "", row, body));
  return { kind: "elsewhere", root, name, preview, given, result, state };
}

function showElsewhere(shown, part) {
  shown.root.dataset.state = part.state;
  setText(shown.name, visible(part.name));
  setText(shown.preview, visible(part.arguments).slice(0, PREVIEW_CHARS));
  setText(shown.given, visible(indented(part.arguments)));
  setText(shown.result, visible(indented(part.text)));
  setText(shown.state, `${STATE_WORDS[part.state] ?? part.state}, elsewhere`);
}

/**
 * A tool call: a row with its state; its arguments and its result when unfolded. Below it, always in sight: how far it
 * is, what it asks a person, and what the sub-agent does whose work it is.
 */
class CallView {
  #state = element("span", "state");
  #time = element("span", "time");
  #argumentsLabel = element("h4", "", "Arguments");
  #arguments = element("pre", "", "");
  #result = element("pre", "", "");
  #resultLabel = element("h4", "", "Result");
  #late = element("pre", "", "");
  #lateLabel = element("h4", "", "Came late, after the call was closed");
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
    this.root = element(
      "li",
      "call",
      element("details", "", row, body),
      this.#progress,
      this.#decided,
      this.#work,
    );
    this.root.dataset.call = call.id;
    this.#progress.dir = this.#decided.dir = "auto";
  }

  show(call, now) {
    this.root.dataset.state = call.state;
    setText(
      this.#state,
      `${STATE_WORDS[call.state] ?? call.state}${call.run > 1 ? `, run ${call.run}` : ""}`,
    );
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
    setText(this.#decided, decidedOf(call));
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
    this.#card = new QuestionCard(call, question, answer, this.#actions.stored);
    this.root.insertBefore(this.#card.root, this.#work);
  }

  #showWork(call, now) {
    this.#work.hidden = call.work === null;
    if (call.work === null) return;
    const { session, transcript } = call.work;
    this.#workActions ??= {
      answer: (inner, ...more) => this.#actions.answer(inner || session, ...more),
      stored: this.#actions.stored,
      resume: () => {}, // a sub-agent goes on with the turn that called it
    };
    for (const [number, turn] of transcript.turns) {
      if (!this.#workViews.has(number)) {
        const made = new TurnView(number, this.#workActions);
        this.#workViews.set(number, made);
        this.#work.append(made.root);
      }
      this.#workViews.get(number).show(turn, [], now, false);
    }
  }
}

const DECISIONS = {
  allow: "Allowed",
  deny: "Denied",
  respond: "Answered",
  happened: "Said to have happened",
  rerun: "Sent to run again",
  skip: "Skipped",
};

function decidedOf({ answer }) {
  if (answer === null) return "";
  const by = answer.by ? ` by ${visible(answer.by)}` : "";
  return `${DECISIONS[answer.choice] ?? answer.choice}${by}${answer.text ? `: ${visible(answer.text)}` : ""}`;
}

/**
 * JSON with its parts on lines of their own; anything else as it is, and so JSON that says more than this language can
 * hold (long numbers, a name twice): whoever decides about it must see what is there.
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
 * A turn as one strip: above, what the server did (the model spoke, tools ran, another server went on); below it,
 * when this page was cut off from it.
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
      const told = isVoid ? "model, cut off" : "model";
      bars.push(
        bar(
          isVoid ? "model void" : "model",
          at(from),
          at(to ?? end),
          0,
          7,
          `${told}: ${duration((to ?? end) - from)}`,
        ),
      );
    }
    for (const response of turn.responses.values()) {
      for (const { name, state, startedAt, endedAt } of response.calls.values()) {
        if (!startedAt) continue;
        const told = `${visible(name)}: ${duration((endedAt ?? end) - startedAt)}, ${state}`;
        bars.push(bar(`tool ${state}`, at(startedAt), at(endedAt ?? end), 0, 7, told));
      }
    }
    for (const { from, to } of cuts) {
      bars.push(
        bar("cut", at(from), at(to ?? end), 9, 3, `this page was cut off: ${duration((to ?? end) - from)}`),
      );
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

function bar(kind, from, to, y, height, told) {
  const made = document.createElementNS(SVG, "rect");
  const title = document.createElementNS(SVG, "title");
  title.textContent = told;
  made.append(title);
  const place = { class: kind, x: from, y, width: Math.max(to - from, 3), height };
  for (const [name, value] of Object.entries(place)) made.setAttribute(name, String(value));
  return made;
}

/** Change an element's one text node, and only where it changed: words are appended, not set anew. */
function setText(target, text) {
  const node = target.firstChild;
  if (node === null) {
    if (text) target.append(text);
  } else if (node.data !== text) {
    if (text.startsWith(node.data)) node.appendData(text.slice(node.data.length));
    else node.data = text;
  }
}
