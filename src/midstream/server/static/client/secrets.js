/**
 * The secret of each session: shown by all of its streams, by its readers and with every request about it.
 *
 * It is drawn with the first stream. It stays, unless the server says that the session is not encrypted under it: then the
 * stream's own copy is enough. While it is being changed there are two: the next one is written down
 * first, and both are shown, until the server is known to open the session by the next one. What is kept is read each
 * time, and changed in one transaction: of two tabs the first one wins, and the other one sees it.
 */

import { randomText } from "./lines.js";

const SECRET_BYTES = 32;
/** Stands behind the name of a session in the names of its sub-agents' sessions, which its secret opens too. */
const PART_MARK = "::";

/** The secrets of the sessions of one server, as they are shown: `{secret, oldSecret}`, each "" where there is none. */
export class SessionSecrets {
  #server;
  #storage;
  #unneeded = new Set(); // sessions of which the server said so

  constructor(server, storage) {
    this.#server = server;
    this.#storage = storage;
  }

  /**
   * What opens a session for a new stream that speaks there: `first`, and then `again` with each connection. `own` is the
   * stream's secret where the session needs none. `learned` is to be told whether the server encrypts the session.
   */
  ofStream(session) {
    const reader = this.ofReader(session);
    if (this.#unneeded.has(rootOf(session))) return { ...reader, own: drawn() };
    return { ...reader, own: "", first: () => this.made(session) };
  }

  /** The same for one that only reads, or has a secret. */
  ofReader(session) {
    const known = () => this.known(session);
    const learned = (isEncrypted, secret) => this.#learned(rootOf(session), isEncrypted, secret);
    return { first: known, again: known, learned };
  }

  /** Return what a session is opened with, as far as that is known here. */
  async known(session) {
    return shownBy(await this.#changed(session, (kept) => kept));
  }

  /** Return what a session is opened with; for a new one a secret is drawn, and kept where it may be needed. */
  async made(session) {
    const isKept = !this.#unneeded.has(rootOf(session));
    const made = await this.#changed(session, (kept) => kept ?? (isKept ? { secret: drawn() } : null));
    return shownBy(made ?? { secret: drawn() });
  }

  /** Keep the secret of a session, as another client of this person told it; return what counts now. */
  async keep(session, secret) {
    return shownBy(await this.#changed(session, () => ({ secret })));
  }

  /** Keep and show no secret of a session any more. */
  async discard(session) {
    await this.#changed(session, () => null);
  }

  /** Draw the next secret of a session, unless one was drawn, and return both. */
  async beginChange(session) {
    const begun = ({ secret, next } = { secret: drawn() }) => ({ secret, next: next ?? drawn() });
    return shownBy(await this.#changed(session, (kept) => begun(kept ?? undefined)));
  }

  /** The server opens the session by `secret`: the one before is forgotten. */
  async endChange(session, secret) {
    await this.#changed(session, (kept) => (kept?.next === secret ? { secret } : kept));
  }

  /**
   * Keep the secret of a session that its server encrypts under it, and no other one. A session that needed none may be gone
   * and begun anew at another kind of server.
   */
  #learned(root, isEncrypted, secret) {
    if (isEncrypted && secret && this.#unneeded.delete(root))
      this.#changed(root, (kept) => kept ?? { secret }).catch(() => this.#unneeded.add(root)); // and told again
    if (isEncrypted || this.#unneeded.has(root)) return;
    this.#unneeded.add(root);
    this.#changed(root, () => null).catch(() => this.#unneeded.delete(root));
  }

  #changed(session, change) {
    return this.#storage.sessionSecret(this.#server, rootOf(session), change);
  }
}

/** What opens a session for somebody who was given a word for it. */
export function ofViewer(word) {
  const told = async () => ({ secret: word });
  return { first: told, again: told, learned: () => {} };
}

/** Return the headers of a request that shows a session's secret. */
export function headersOf({ secret, oldSecret }) {
  const named = { "x-idempotent-encryption-key": secret, "x-idempotent-encryption-key-old": oldSecret };
  return Object.fromEntries(Object.entries(named).filter(([, value]) => value));
}

function drawn() {
  return randomText(SECRET_BYTES);
}

function shownBy(kept) {
  const { secret = "", next } = kept ?? {};
  return next ? { secret: next, oldSecret: secret } : { secret, oldSecret: "" };
}

/** Return the session that this one is part of, or itself. */
export function rootOf(session) {
  return session.split(PART_MARK, 1)[0];
}
