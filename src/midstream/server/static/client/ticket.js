/**
 * WebSockets for pages of another origin. A browser sends no headers with a WebSocket. So the client requests a ticket with
 * the headers and opens the WebSocket with it. A ticket is valid once, for half a minute, for the page's origin.
 *
 * `connect({ headers })` opens its WebSockets in this way.
 */

import { errorOfClose, refusalOf } from "./connections.js";
import { MidstreamError } from "./errors.js";

const CONNECTING = 0;
const CLOSED = 3;

/** Return a `makeSocket` for `connect`. `headers` returns, or promises, the headers that authenticate the request. */
export function createTicketSocketFactory(headers, { action = "send" } = {}) {
  return (address) => new TicketedSocket(address, headers, action);
}

/** A WebSocket that requests its ticket first. */
class TicketedSocket {
  onopen = null;
  onmessage = null;
  onclose = null;
  #socket = null;
  #isClosed = false;

  constructor(address, headers, action) {
    this.#open(address, headers, action).catch((error) => this.#end(error));
  }

  get readyState() {
    if (this.#isClosed) return CLOSED;
    return this.#socket?.readyState ?? CONNECTING;
  }

  send(frame) {
    this.#socket?.send(frame);
  }

  close() {
    this.#isClosed = true;
    this.#socket?.close();
  }

  async #open(address, headers, action) {
    const tickets = address.replace(/^ws/, "http").replace(/\/stream$/, "/tickets");
    const answer = await fetch(tickets, {
      method: "POST",
      redirect: "manual",
      headers: { "content-type": "application/json", ...(await headers()) },
      body: JSON.stringify({ action }),
    });
    if (!answer.ok) throw await refusalOf(answer);
    const { token } = await answer.json();
    if (this.#isClosed) return;
    this.#socket = new WebSocket(`${address}?ticket=${encodeURIComponent(token)}`);
    this.#socket.onopen = (event) => this.onopen?.(event);
    this.#socket.onmessage = (event) => this.onmessage?.(event);
    this.#socket.onclose = (event) => this.#end(errorOfClose(event));
  }

  #end(error = null) {
    this.#isClosed = true;
    this.onclose?.({ error: error instanceof MidstreamError ? error : null });
  }
}
