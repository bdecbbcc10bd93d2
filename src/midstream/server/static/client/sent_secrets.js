/** The secrets that a stream sends, and their refusal: another tab may have changed them (STREAM-96). */

import { WRONG_SECRET } from "./errors.js";

export class SentSecrets {
  oldSecret = "";
  #own; // the secret at the beginning of the stream; null for a reader
  #opened = ""; // the secrets in the `open` of this connection
  #refusal = null; // {error, opened}: the secrets that the server refused
  #wasRefused = false; // a refusal was received since the last welcome

  constructor(secret, isOwned) {
    this.secret = secret;
    this.#own = isOwned ? secret : null;
  }

  get #both() { return `${this.secret} ${this.oldSecret}`; }

  /**
   * Send this secret from now on; "" changes nothing. Return the refusal if the server has refused the same secrets before,
   * else null. The first secret of the stream is sent beside it if it differs: the session's secret was changed, or the
   * stream had a secret of its own.
   */
  show(secret, oldSecret) {
    if (secret) {
      if (this.#own === "") this.#own = secret;
      this.secret = secret;
      this.oldSecret = oldSecret || (this.#own === secret ? "" : (this.#own ?? ""));
    }
    const refusal = this.#refusal;
    this.#refusal = null;
    return refusal?.opened === this.#both ? refusal.error : null;
  }

  /** Note that the current secrets are in the `open` of a connection. */
  noteOpen() { this.#opened = this.#both; }

  /** Note that the server accepted the secrets: the next refusal is a first one. */
  noteWelcome() { this.#wasRefused = false; }

  /** Note the first refusal of the secrets, after which they are read once more. Return false for every other error. */
  noteRefusal(error) {
    if (error?.code !== WRONG_SECRET || this.#wasRefused) return false;
    this.#wasRefused = true;
    this.#refusal = { error, opened: this.#opened };
    return true;
  }
}
