/** `midstream.js` as the subject of a `WireTrial`: the calls of an application, and a clock that advances on request. */

import { HttpConnection } from "./client/http.js";
import { connect } from "./client/midstream.js";
import { IndexedStorage } from "./client/storage.js";

/** A clock that advances on request to the next timer. */
class StandingClock {
  #now = 0;
  #timers = new Map();

  now() {
    return this.#now;
  }

  set(act, milliseconds) {
    const timer = Symbol("timer");
    this.#timers.set(timer, { act, at: this.#now + milliseconds });
    return timer;
  }

  clear(timer) {
    this.#timers.delete(timer);
  }

  advance() {
    const [timer, next] = [...this.#timers].sort(([, one], [, other]) => one.at - other.at)[0] ?? [];
    if (next === undefined) return;
    this.#timers.delete(timer);
    this.#now = Math.max(this.#now, next.at);
    next.act();
  }
}

/** A connection that counts its frames. */
class CountedConnection {
  framesSent = 0;

  constructor(connection, counts) {
    this.connection = connection;
    connection.onopen = (event) => this.onopen?.(event);
    connection.onbytes = (event) => this.onbytes?.(event);
    connection.onclose = (event) => this.onclose?.(event);
    connection.onmessage = (event) => {
      counts.framesReceived += 1;
      this.onmessage?.(event);
    };
  }

  send(frame) {
    this.framesSent += 1;
    this.connection.send(frame);
  }

  close() {
    this.connection.close();
  }
}

export class Trial {
  #clock = new StandingClock();
  #counts = { framesReceived: 0 };
  #connection = null;
  #given = [];
  #asking = null;

  async begin(session, transport) {
    this.session = session;
    this.transport = transport;
    this.storage = await IndexedStorage.open();
    const makeSocket = (address) => {
      const http = address.replace(/^ws/, "http").replace(/\/stream$/, "");
      const connection = transport === "websocket" ? new WebSocket(address) : new HttpConnection(http, transport);
      this.#connection = new CountedConnection(connection, this.#counts);
      return this.#connection;
    };
    const chance = () => 0;
    this.client = await connect({ makeSocket, chance, clock: this.#clock, storage: this.storage });
  }

  async resume() {
    const [stream] = await this.client.resumeInterrupted({ session: this.session });
    this.#take(stream);
  }

  #take(stream) {
    this.stream = stream;
    this.events = stream[Symbol.asyncIterator]();
  }

  submit({ type, parts }) {
    if (type === "send") this.#take(this.client.send(this.session, parts[0].text));
    else this.stream.abort();
  }

  detach() {
    this.stream.detach();
  }

  async markHandled(id) {
    while (this.#given.at(-1)?.id !== id) await this.#next();
    this.#next().catch(() => {}); // a request for the next event marks this one as handled
  }

  #next() {
    this.#asking ??= this.events.next().then(({ value, done }) => {
      this.#asking = null;
      if (!done) this.#given.push(value);
    });
    return this.#asking;
  }

  advanceClock() {
    this.#clock.advance();
  }

  async readState() {
    for (let turns = 0; turns < 2; turns += 1) {
      await new Promise((resolve) => setTimeout(resolve));
      await this.stream.settled;
    }
    const { connection, isAcknowledged, isDegraded } = this.stream;
    const isOver = connection.phase === "ended";
    const { streams } = await this.storage.load();
    return {
      phase: connection.phase,
      code: isOver ? ((await this.stream.ended)?.code ?? null) : null,
      delivered: [...this.#given, ...this.stream.unread].map((event) => (event.type === "gone" ? "gone" : event.id)),
      is_acknowledged: isAcknowledged,
      is_reconnecting: connection.isReconnecting,
      is_degraded: isDegraded,
      has_checkpoint: streams.some((kept) => kept.key === this.stream.key),
      frames_received: this.#counts.framesReceived,
      frames_sent: this.#connection?.framesSent ?? 0,
    };
  }

  /** Do not close the client when the page is killed. */
  die() {
    this.client.close = () => {};
  }

  end() {
    this.client.close();
  }
}
