/** Server-sent events from pieces of any size, by the standard's rules for the parts that a server of ours says. */

/** Characters of one event; a record holds a whole response at most. */
const EVENT_CHARS_MAX = 16 * 1024 * 1024;

/** Parse one body. `feed` returns the events that a piece of text makes whole: {id, type, data}. */
export class SseDecoder {
  #rest = "";
  #id = "";
  #type = "";
  #data = [];
  #chars = 0;

  /** Throws `RangeError` where an event is larger than any of ours. */
  feed(piece) {
    if (!this.#rest.endsWith("\r") && !/[\r\n]/.test(piece)) return this.#hold(this.#rest + piece);
    const lines = (this.#rest + piece).split(/\r\n|\n|\r(?!$)/);
    const rest = lines.pop();
    const events = lines.map((line) => this.#take(line)).filter((event) => event !== null);
    this.#hold(rest);
    return events;
  }

  #hold(rest) {
    this.#rest = rest;
    if (this.#chars + rest.length > EVENT_CHARS_MAX) throw new RangeError("an event is too large");
    return [];
  }

  #take(line) {
    if (line === "") return this.#dispatch();
    const [, name, value] = /^([^:]*):? ?([^]*)$/.exec(line);
    if (name === "id" && !value.includes("\0")) this.#id = value;
    if (name === "event") this.#type = value;
    if (name === "data") {
      this.#data.push(value);
      this.#chars += value.length + 1;
    }
    return null; // other names are comments (none) and what a later standard added
  }

  #dispatch() {
    const event = { id: this.#id, type: this.#type || "message", data: this.#data.join("\n") };
    const isNone = this.#data.length === 0;
    this.#data = [];
    this.#chars = 0;
    this.#type = "";
    return isNone ? null : event;
  }
}
