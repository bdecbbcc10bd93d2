/** Decoder of server-sent events, for the parts of the standard that midstream servers use. */

/** Limit for the characters of one event. The largest record has a whole response. */
const EVENT_CHARS_MAX = 16 * 1024 * 1024;

/** Decodes one body. `feed` returns the events that a piece of text completes: `{id, type, data}`. */
export class SseDecoder {
  #rest = "";
  #id = "";
  #type = "";
  #data = [];
  #chars = 0;

  /** Return the events that `piece` completes. Throws `RangeError` if an event is too large. */
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
    if (this.#chars + rest.length > EVENT_CHARS_MAX) throw new RangeError(`an event has more than ${EVENT_CHARS_MAX} characters`);
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
    return null; // a comment, or a field of a later standard
  }

  #dispatch() {
    const event = { id: this.#id, type: this.#type || "message", data: this.#data.join("\n") };
    const isEmpty = this.#data.length === 0;
    this.#data = [];
    this.#chars = 0;
    this.#type = "";
    return isEmpty ? null : event;
  }
}
