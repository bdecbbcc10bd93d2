/**
 * The secret of each session. Its streams, its readers and all requests about it send the secret.
 *
 * The first stream of a session draws the secret at random. The secret is deleted if the server reports that it does not
 * encrypt the session under it: then the copy of the stream is enough.
 *
 * A change of the secret stores the next one first. Both are sent until the server has confirmed the next one. Each use
 * reads the storage, and each change is one transaction. So if two tabs change a secret, the first change wins for both.
 */

import { randomText } from "./connections.js";

const SECRET_BYTES = 32;
/** Separates the name of a session from the rest in the names of its sub-agents' sessions. One secret opens them all. */
const CHILD_MARK = "::";

/** The secrets of the sessions of one server, as `{secret, oldSecret}`. Each is "" if there is none. */
export class SessionSecrets {
  #server;
  #storage;
  #unneeded = new Set(); // sessions that the server does not encrypt under the client's secret

  constructor(server, storage) {
    this.#server = server;
    this.#storage = storage;
  }

  /**
   * Return the access to a session for a new stream. `readFirst` returns the secrets at the beginning, `read` those for each
   * connection. `own` is the secret of the stream if the session needs none. `noteEncryption` takes the server's report
   * whether it encrypts the session.
   */
  accessForStream(session) {
    const reader = this.accessForReader(session);
    if (this.#unneeded.has(rootOf(session))) return { ...reader, own: randomSecret() };
    return { ...reader, own: "", readFirst: () => this.readOrCreate(session) };
  }

  /** Return the access to a session for a reader, or for a stream with a secret. */
  accessForReader(session) {
    const known = () => this.read(session);
    const noteEncryption = (isEncrypted, secret) => this.#noteEncryption(rootOf(session), isEncrypted, secret);
    return { readFirst: known, read: known, noteEncryption };
  }

  /** Return the stored secrets of a session. */
  async read(session) {
    return secretsToShow(await this.#update(session, (stored) => stored));
  }

  /** Return the secrets of a session. A session without a secret gets one, which is stored if the server may need it. */
  async readOrCreate(session) {
    const isStored = !this.#unneeded.has(rootOf(session));
    const stored = await this.#update(session, (found) => found ?? (isStored ? { secret: randomSecret() } : null));
    return secretsToShow(stored ?? { secret: randomSecret() });
  }

  /** Store the secret of a session from another client of the same person; return the secrets to send. */
  async keep(session, secret) {
    return secretsToShow(await this.#update(session, () => ({ secret })));
  }

  /** Delete the secret of a session. */
  async discard(session) {
    await this.#update(session, () => null);
  }

  /** Draw the next secret of a session, unless there is one, and return both. */
  async beginChange(session) {
    const begun = ({ secret, next } = { secret: randomSecret() }) => ({ secret, next: next ?? randomSecret() });
    return secretsToShow(await this.#update(session, (stored) => begun(stored ?? undefined)));
  }

  /** Delete the old secret, as the server opens the session by `secret`. */
  async endChange(session, secret) {
    await this.#update(session, (stored) => (stored?.next === secret ? { secret } : stored));
  }

  /**
   * Store the secret of a session if the server encrypts the session under it; delete it otherwise. The answer can change,
   * if the session is deleted and begins again at another server.
   */
  #noteEncryption(root, isEncrypted, secret) {
    if (isEncrypted && secret && this.#unneeded.delete(root))
      this.#update(root, (stored) => stored ?? { secret }).catch(() => this.#unneeded.add(root)); // the next report tries again
    if (isEncrypted || this.#unneeded.has(root)) return;
    this.#unneeded.add(root);
    this.#update(root, () => null).catch(() => this.#unneeded.delete(root));
  }

  #update(session, change) {
    return this.#storage.updateSecret(this.#server, rootOf(session), change);
  }
}

/** Return the access to a session with a viewer token. */
export function accessForViewer(token) {
  const readToken = async () => ({ secret: token });
  return { readFirst: readToken, read: readToken, noteEncryption: () => {} };
}

/** Return the headers with the secrets of a session. */
export function headersOf({ secret, oldSecret }) {
  const headers = { "x-idempotent-encryption-key": secret, "x-idempotent-encryption-key-old": oldSecret };
  return Object.fromEntries(Object.entries(headers).filter(([, value]) => value));
}

function randomSecret() {
  return randomText(SECRET_BYTES);
}

function secretsToShow(stored) {
  const { secret = "", next } = stored ?? {};
  return next ? { secret: next, oldSecret: secret } : { secret, oldSecret: "" };
}

/** Return the session of the first agent: for the session of a sub-agent, the one that called it. */
export function rootOf(session) {
  return session.split(CHILD_MARK, 1)[0];
}
