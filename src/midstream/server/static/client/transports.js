/**
 * Selection of the transport to a server. The transport that works is stored for some time.
 *
 * The order is WebSocket, server-sent events, long polls: a WebSocket costs least, and long polls work wherever a page
 * loads. The next transport is tried if one is refused or carries no frame.
 *
 * A browser does not report why a WebSocket failed. After two lost WebSockets the next transport is tried. Once that works,
 * a probe opens one more WebSocket, on which the server sends one message. Only if the probe fails too, WebSockets count as
 * refused. Failures do not count while the server answers no request, as during a restart.
 */

import { HttpConnection } from "./http.js";
import { FailedConnection, closeQuietly, errorOfClose } from "./connections.js";
import { MidstreamError, connectionLostError } from "./errors.js";
import { CONNECT_WITHIN_MS } from "./retries.js";
import { createTicketSocketFactory } from "./ticket.js";

/** The transports, the best first. */
export const TRANSPORTS = ["websocket", "sse", "poll"];
/** Limit for the first frame of an open connection. A server sends `welcome` at once. */
export const FIRST_FRAME_WITHIN_MS = 5000;
/** Connections in a row that may be lost before their first frame until the next transport is tried. */
const LOST_MAX = 2;
/** Time for which a transport is stored if a better one is certainly refused. */
const STORED_MS = 24 * 60 * 60 * 1000;
/** Time for which it is stored if the better ones were only lost, as in any bad network. */
const STORED_DOUBTFUL_MS = 10 * 60 * 1000;

/** Statuses of a proxy whose server is away or not ready. */
const AWAY = new Set([502, 503, 504]);

/** Selects the transport for the connections of one client. */
export class TransportSelection {
  #url;
  #fixed;
  #headers;
  #makeSocket;
  #environment;
  #first = { transport: TRANSPORTS[0], until: 0 };
  #candidate = null; // the transport to begin with, as the better ones were lost, until it works
  #lostInARow = 0;

  /** @param environment The `{clock, wall, storage}` of `LiveStream`. */
  constructor({ url, transport, headers, makeSocket }, environment) {
    this.#url = url;
    this.#headers = headers;
    this.#makeSocket = makeSocket ?? (headers ? createTicketSocketFactory(headers) : (address) => new WebSocket(address));
    this.#fixed = makeSocket ? TRANSPORTS[0] : transport === "auto" ? null : transport;
    this.#environment = environment;
  }

  /** Return a connection to a session, over the transport that works. */
  dial(session) {
    return this.#fixed ? this.open(this.#fixed, session) : new TransportTrial(this, session, this.#environment.clock);
  }

  /** Return a connection to a session over one transport. */
  open(transport, session) {
    const address = `${this.#url}/v1/sessions/${encodeURIComponent(session)}`;
    try {
      if (transport === "websocket") return this.#makeSocket(`${address.replace(/^http/, "ws")}/stream`);
      return new HttpConnection(address, transport, this.#headers ?? undefined);
    } catch (error) {
      // An old Node has no WebSocket, and an https page cannot open one to http. The next transport may work.
      const refusal = new MidstreamError("usage", `a ${transport} connection cannot be made here (${error.name})`);
      return new FailedConnection(Object.assign(refusal, { isForeign: true }));
    }
  }

  /** Return the transports in the order of trial. */
  async order() {
    const now = this.#environment.wall();
    const isBelieved = ({ until }) => now < until && until <= now + STORED_MS; // a later time comes from a wrong clock
    if (!isBelieved(this.#first)) {
      const known = await this.#environment.storage.loadTransport(this.#url).catch(() => null);
      const isValid = known !== null && isBelieved(known) && TRANSPORTS.includes(known.transport);
      const until = now + STORED_DOUBTFUL_MS;
      this.#first = isValid ? known : { transport: TRANSPORTS[0], until };
    }
    const at = TRANSPORTS.indexOf(this.#candidate ?? this.#first.transport);
    return [...TRANSPORTS.slice(at), ...TRANSPORTS.slice(0, at)];
  }

  /** Begin with this transport from now on, and store it. */
  async noteSuccess(transport) {
    this.#lostInARow = 0;
    const isDoubtful = transport === this.#candidate;
    this.#candidate = null;
    if (transport === this.#first.transport) return;
    const isSure = !isDoubtful || (!this.#headers && (await this.#isRefused())); // a ticket is not valid for the probe
    const until = this.#environment.wall() + (isSure ? STORED_MS : STORED_DOUBTFUL_MS);
    this.#first = { transport, until };
    const stored = transport === TRANSPORTS[0] ? null : this.#first;
    await this.#environment.storage.storeTransport(this.#url, stored).catch(() => {}); // the next page searches again
  }

  /**
   * Count a connection that was lost before its first frame. After `LOST_MAX` in a row the next transport is tried. While
   * the server answers no request at all, nothing is counted (STREAM-108).
   */
  async noteLoss(transport) {
    if (!(await this.isServerThere())) return;
    this.#lostInARow += 1;
    if (this.#lostInARow < LOST_MAX) return;
    this.#lostInARow = 0;
    this.#candidate = TRANSPORTS[(TRANSPORTS.indexOf(transport) + 1) % TRANSPORTS.length];
  }

  /** Return whether a server answers a plain HTTP request now, with any status. */
  async isServerThere() {
    try {
      const headers = (await this.#headers?.()) ?? {};
      const signal = AbortSignal.timeout(FIRST_FRAME_WITHIN_MS);
      const answer = await fetch(`${this.#url}/v1/probe/poll`, { cache: "no-store", redirect: "manual", headers, signal });
      return !AWAY.has(answer.status);
    } catch {
      return false;
    }
  }

  /** Return whether the probe's WebSocket fails, although the server answers HTTP requests. */
  #isRefused() {
    return new Promise((resolve) => {
      const socket = new WebSocket(`${this.#url.replace(/^http/, "ws")}/v1/probe/stream`);
      const settle = (isRefused) => {
        this.#environment.clock.clear(timer);
        closeQuietly(socket);
        resolve(isRefused);
      };
      const timer = this.#environment.clock.set(() => settle(true), FIRST_FRAME_WITHIN_MS);
      socket.onmessage = () => settle(false);
      socket.onclose = () => settle(true);
    });
  }
}

/**
 * A connection that finds its transport. Frames are sent again over the next transport, until a frame is received. The
 * server accepts each command once, so a repetition is harmless (STREAM-12).
 */
class TransportTrial {
  onopen = null;
  onmessage = null;
  onclose = null;
  onbytes = null;
  #selection;
  #session;
  #clock;
  #order = [];
  #connection = null;
  #isReady = false; // `#connection` accepts frames
  #sent = [];
  #isOpen = false; // `onopen` was called
  #isSettled = false;
  #isOver = false;
  #refusal = null;
  #timer = null;

  constructor(selection, session, clock) {
    this.#selection = selection;
    this.#session = session;
    this.#clock = clock;
    selection.order().then((order) => {
      this.#order = order;
      this.#next();
    });
  }

  send(frame) {
    if (!this.#isSettled) this.#sent.push(frame);
    if (this.#isReady) this.#connection.send(frame);
  }

  close() {
    this.onopen = this.onmessage = this.onclose = this.onbytes = null;
    this.#end(null);
  }

  #next() {
    if (this.#isOver) return;
    const [transport] = this.#order;
    const connection = this.#selection.open(transport, this.#session);
    this.#connection = connection;
    const silent = () => this.#fail(connectionLostError(`no frame was received over ${transport}`), true);
    this.#within(CONNECT_WITHIN_MS, async () => {
      const isSwallowed = await this.#selection.isServerThere(); // STREAM-109
      if (this.#connection === connection && !this.#isReady) this.#fail(connectionLostError(`no connection over ${transport} was made`), isSwallowed);
    });
    connection.onopen = () => {
      this.#isReady = true;
      this.#within(FIRST_FRAME_WITHIN_MS, silent);
      for (const frame of this.#sent) connection.send(frame);
      if (!this.#isOpen) this.onopen?.({});
      this.#isOpen = true;
    };
    connection.onbytes = () => this.onbytes?.({});
    connection.onmessage = ({ data }) => {
      if (!this.#isSettled) this.#settle(transport);
      this.onmessage?.({ data });
    };
    connection.onclose = (event) => this.#fail(errorOfClose(event) ?? connectionLostError("the connection was lost"));
  }

  #settle(transport) {
    this.#clock.clear(this.#timer);
    this.#isSettled = true;
    this.#sent = [];
    this.#selection.noteSuccess(transport);
  }

  /** Close a failed connection. Try the next transport if the network between may be the cause; end otherwise. */
  #fail(error, isSilent = false) {
    if (this.#isOver) return;
    closeQuietly(this.#connection);
    this.#connection = null;
    this.#isReady = false;
    if (this.#isSettled) return void this.#end(error);
    if (!isSilent && !error.isForeign) {
      if (error.code === "connection_lost") this.#selection.noteLoss(this.#order[0]);
      return void this.#end(error);
    }
    this.#refusal ??= error;
    this.#order.shift();
    if (this.#order.length === 0) this.#end(this.#refusal);
    else this.#next();
  }

  #within(milliseconds, act) {
    this.#clock.clear(this.#timer);
    this.#timer = this.#clock.set(act, milliseconds);
  }

  #end(error) {
    if (this.#isOver) return;
    this.#isOver = true;
    this.#clock.clear(this.#timer);
    closeQuietly(this.#connection);
    this.#connection = null;
    this.#isReady = false;
    this.onclose?.({ error });
  }
}
