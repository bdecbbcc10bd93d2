/**
 * The card of an open question: the call, the reason of the question, and the choices.
 *
 * A card belongs to one question and stays until the question is answered. So changes of the transcript do not discard a
 * half-written answer.
 */

import { element, indented } from "./view.js";
import { escaped, visible } from "./visible.js";

const HEADS = { approval: "May this run?", question: "The agent asks you", doubt: "Did this happen?" };
const DOUBT =
  "The process that ran this call died before its outcome was known. It may or may not have taken effect.";
const LABELS = {
  allow: "Allow",
  deny: "Deny",
  respond: "Answer",
  happened: "It happened",
  rerun: "Run it again",
  skip: "Skip it",
};
const HINTS = {
  approval: "Why not, if you deny it (optional)",
  question: "Your answer",
  doubt: "What came of it, if it happened (optional)",
};
/** Choices with an optional text. */
const WITH_TEXT = new Set(["deny", "respond", "happened"]);
/** Choices that run the call. They are enabled after the end of the arguments was visible. */
const RUNS = new Set(["allow", "rerun", "edit"]);

/** Time after which an unacknowledged answer is displayed as stored: the server may be away. */
const SENT_WITHIN_MS = 600;

/**
 * The card of one open question. `answer(choice, {text, argumentsJson})` returns a promise; it rejects if the answer is
 * refused. `whenStored()` resolves when this browser has stored the answers so far. A reload before that loses them.
 */
export class QuestionCard {
  #question;
  #answer;
  #whenStored;
  #text = element("input", "answer-text");
  #edited = element("textarea", "edited");
  #shown = element("pre", "asked-arguments");
  #unseen = element("p", "unseen", "Scroll to the end of the arguments to decide.");
  #buttons = element("div", "choices");
  #problem = element("p", "problem");
  #storedNote = element("p", "kept", "Your answer is kept here until the server has it.");
  #isEditing = false;
  #isSeen = true;
  #isSending = false;

  constructor(call, question, answer, whenStored) {
    this.#question = question;
    this.#answer = answer;
    this.#whenStored = whenStored;
    this.root = element("form", "question", element("h4", "", HEADS[question.kind] ?? "Question"));
    this.root.dataset.kind = question.kind;
    this.root.setAttribute("role", "group");
    this.root.setAttribute("aria-label", `${HEADS[question.kind] ?? "Question"} ${visible(call.name)}`);
    if (question.kind === "doubt") this.root.append(element("p", "why", DOUBT));
    if (question.text) this.root.append(this.#paragraph(question.text));
    this.#fill(call);
    this.root.addEventListener("submit", (event) => {
      event.preventDefault();
      // Enter in the text input sends a text, and never runs a call.
      const choice = question.choices.find((each) => WITH_TEXT.has(each));
      if (choice && this.#text.value.trim()) this.#send(choice);
    });
  }

  #paragraph(text) {
    const created = element("p", "why", visible(text));
    created.dir = "auto";
    return created;
  }

  #fill(call) {
    const { kind, choices, expiresAt, isFixed } = this.#question;
    this.#shown.textContent = visible(indented(call.edited ?? call.arguments));
    this.#edited.value = escaped(indented(call.edited ?? call.arguments));
    this.#edited.rows = Math.min(12, this.#edited.value.split("\n").length + 1);
    this.#edited.spellcheck = false;
    this.#edited.setAttribute("aria-label", "Arguments, as JSON");
    this.#edited.hidden = true;
    this.#text.placeholder = HINTS[kind] ?? "";
    this.#text.setAttribute("aria-label", HINTS[kind] ?? "Answer");
    this.#text.autocomplete = "off";
    this.#text.dir = "auto";
    this.#problem.hidden = true;
    this.#problem.setAttribute("role", "alert");
    if (kind === "question") this.root.append(this.#options(call));
    else {
      const name = element("p", "asked-name", element("bdi", "", visible(call.name)));
      this.root.append(name, this.#shown, this.#unseen, this.#edited);
    }
    if (choices.some((choice) => WITH_TEXT.has(choice))) this.root.append(this.#text);
    for (const choice of choices) this.#buttons.append(this.#button(LABELS[choice] ?? choice, choice));
    if (kind === "approval" && !isFixed) this.#buttons.append(this.#editButton());
    this.#storedNote.hidden = true;
    this.#storedNote.setAttribute("role", "status");
    this.root.append(this.#buttons, this.#storedNote, this.#problem);
    if (kind !== "question") this.#awaitEnd();
    if (expiresAt) {
      const until = new Date(expiresAt * 1000).toLocaleString(undefined, { dateStyle: "short", timeStyle: "short" });
      this.root.append(element("p", "until", `Until ${until}`));
    }
  }

  /** Enable the choices that run the call after the end of its arguments was visible. The box and the page may scroll. */
  #awaitEnd() {
    this.#shown.tabIndex = 0; // the keyboard can scroll it
    this.#shown.setAttribute("role", "group");
    this.#shown.setAttribute("aria-label", "Arguments");
    const end = element("span", "end");
    this.#shown.append(end);
    const watcher = new IntersectionObserver((seen) => {
      if (!seen.some((each) => each.isIntersecting)) return;
      watcher.disconnect();
      this.#isSeen = this.#unseen.hidden = true;
      this.#disable(this.#isSending);
    });
    watcher.observe(end);
    this.#isSeen = false;
    this.#disable(false);
  }

  #button(label, choice) {
    const created = element("button", choice === this.#question.choices[0] ? "primary" : "quiet", label);
    created.type = "button";
    created.dataset.choice = choice;
    created.addEventListener("click", () => this.#send(choice));
    return created;
  }

  #options(call) {
    const created = element("div", "options");
    for (const option of optionsOf(call)) {
      const button = element("button", "quiet", visible(option));
      button.type = "button";
      button.addEventListener("click", () => {
        this.#text.value = option;
        this.#send("respond");
      });
      created.append(button);
    }
    created.hidden = created.childElementCount === 0;
    return created;
  }

  #editButton() {
    const created = element("button", "quiet", "Edit arguments");
    created.type = "button";
    created.dataset.choice = "edit";
    created.addEventListener("click", () => {
      this.#isEditing = !this.#isEditing;
      this.#shown.hidden = this.#isEditing;
      this.#edited.hidden = !this.#isEditing;
      created.textContent = this.#isEditing ? "Keep the arguments" : "Edit arguments";
      this.#allowButton().textContent = this.#isEditing ? "Allow with these" : LABELS.allow;
      if (this.#isEditing) this.#edited.focus();
    });
    return created;
  }

  #allowButton() {
    return this.#buttons.querySelector('[data-choice="allow"]');
  }

  #send(choice) {
    const text = WITH_TEXT.has(choice) ? this.#text.value.trim() : "";
    if (choice === "respond" && !text) return void this.#text.focus();
    let argumentsJson = null;
    if (choice === "allow" && this.#isEditing) {
      argumentsJson = objectIn(this.#edited.value);
      if (argumentsJson === null) return void this.#showProblem("These arguments are no JSON object.");
    }
    this.#showProblem("");
    this.#disable(true);
    this.#answer(choice, { text, argumentsJson }).catch((error) => {
      this.#showProblem(`${error.message} (${error.code})`);
      this.#disable(false);
    });
    return undefined;
  }

  #disable(isSending) {
    this.#isSending = isSending;
    this.#storedNote.hidden = true;
    if (isSending) setTimeout(() => this.#showStored(), SENT_WITHIN_MS);
    this.root.classList.toggle("is-sending", isSending);
    for (const each of this.root.querySelectorAll("button, input, textarea"))
      each.disabled = isSending || (!this.#isSeen && RUNS.has(each.dataset.choice));
  }

  #showStored() {
    const show = () => (this.#storedNote.hidden = !this.#isSending);
    this.#whenStored().then(show, () => {}); // another tab blocks the database, so it is unknown whether the answer is stored
  }

  #showProblem(text) {
    this.#problem.textContent = text;
    this.#problem.hidden = !text;
  }
}

/** Return the options of a question, or []. */
function optionsOf(call) {
  try {
    const { options } = JSON.parse(call.arguments);
    return Array.isArray(options) ? options.filter((option) => typeof option === "string").slice(0, 20) : [];
  } catch {
    return [];
  }
}

/** Return the trimmed text if it is a JSON object, else null. */
function objectIn(text) {
  try {
    const value = JSON.parse(text);
    return typeof value === "object" && value !== null && !Array.isArray(value) ? text.trim() : null;
  } catch {
    return null;
  }
}
