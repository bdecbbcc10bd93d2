/** The input with its two buttons, and the unsent texts of other sessions. */

import { find } from "./view.js";

/** Longest time from a click on Send to the second click of a double click, which hits Stop. */
const DOUBLE_CLICK_MS = 700;

export class Composer {
  #drafts = new Map();
  #clickedAt = -Infinity; // the time of the last click on Send

  /** Add the event handlers: `send` and `stop` are the actions of a person, `changed` follows a change of the text. */
  listen({ send, stop, changed }) {
    find("send").addEventListener("click", ({ detail }) => (this.#clickedAt = detail ? performance.now() : -Infinity));
    find("stop").addEventListener("click", ({ detail }) => {
      // Stop appears where Send was. The second click of a double click must not stop the turn.
      const isDouble = detail > 1 || (detail > 0 && performance.now() - this.#clickedAt < DOUBLE_CLICK_MS);
      if (!isDouble) stop();
      this.focus();
    });
    find("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      send();
    });
    find("text").addEventListener("input", () => {
      this.#fit();
      changed();
    });
    find("text").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      send();
    });
  }

  get text() { return find("text").value; }

  focus() { find("text").focus(); }

  write(text) {
    find("text").value = text;
    this.#fit();
  }

  /** Keep the text of one session, and display that of another one. */
  switchDraft(from, to) {
    if (!from || from === to) return;
    this.#drafts.set(from, this.text);
    this.write(this.#drafts.get(to) ?? "");
  }

  show(isBusy, isStopping, isClosed) {
    find("send").hidden = isBusy && !this.text.trim();
    find("stop").hidden = !isBusy;
    find("text").placeholder = isBusy ? "Say what comes next" : "Say something";
    find("stop").disabled = isStopping;
    find("text").disabled = find("send").disabled = isClosed;
  }

  #fit() {
    const box = find("text");
    box.style.height = "auto";
    box.style.height = `${box.scrollHeight}px`;
  }
}
