/** The display of the messages that wait for the end of this turn. */

import { element, find, textOf } from "./view.js";

export class MessageQueue {
  #withdraw;
  #shown = "";

  /** @param withdraw Takes a queued message and its button. */
  constructor(withdraw) {
    this.#withdraw = withdraw;
  }

  show(transcript) {
    const queue = [...transcript.queue.values()];
    const shown = JSON.stringify(queue.map((each) => each.number));
    if (shown === this.#shown) return;
    this.#shown = shown;
    find("queue").hidden = queue.length === 0;
    find("queued").replaceChildren(
      ...queue.map((each) => {
        const text = element("span", "name", textOf(each.message));
        text.dir = "auto";
        const button = element("button", "quiet", "Take back");
        button.type = "button";
        button.addEventListener("click", () => this.#withdraw(each, button));
        return element("li", "", text, button);
      }),
    );
  }
}
