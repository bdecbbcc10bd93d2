/** The light: green is live; amber is reconnecting, with the seconds to the next try; grey is offline or idle. */

import { find } from "./view.js";

/** Time after which a connection that is being made is displayed. */
const PATIENCE_MS = 250;

export class ConnectionLight {
  #connection = { phase: "ended", retryAt: null };
  #hasSource;
  #timer = null;

  /** @param hasSource A function that returns whether the page receives events. */
  constructor(hasSource) {
    this.#hasSource = hasSource;
  }

  /** Display a connection, or the last one again. */
  show(connection = this.#connection) {
    this.#connection = connection;
    const { phase, retryAt } = connection;
    clearTimeout(this.#timer);
    if (!this.#hasSource() && phase !== "waiting") this.#set("idle", "Ready");
    else if (phase === "live") this.#set("live", "Live");
    else if (!navigator.onLine) this.#set("offline", "Offline");
    else if (phase === "waiting") {
      const seconds = Math.max(0, Math.ceil((retryAt - Date.now()) / 1000));
      this.#set("reconnecting", seconds > 0 ? `Reconnecting in ${seconds} s` : "Reconnecting");
      this.#timer = setTimeout(() => this.show(), 200);
    } else if (phase === "connecting") this.#timer = setTimeout(() => this.#set("reconnecting", "Connecting"), PATIENCE_MS);
    // else between two sources
  }

  #set(state, text) {
    const light = find("light");
    if (light.dataset.state !== state) light.dataset.state = state;
    find("retry").hidden = state !== "offline" && !text.startsWith("Reconnecting");
    if (find("light-text").textContent !== text) find("light-text").textContent = text;
  }
}
