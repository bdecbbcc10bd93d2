/**
 * Data that survive a reload: streams, their secrets, unacknowledged commands, the secrets of sessions, and the transport
 * that works.
 *
 * A write is `{op: "stream", value}`, `{op: "secret", value}`, `{op: "command", value}`, `{op: "acked", key, accepted}`
 * (commands below that number are in the server's journal) or `{op: "delete", key}`.
 */

import { restoreCommands } from "./command_outbox.js";
import { MidstreamError } from "./errors.js";

/** Time after its last write for which an interrupted stream is resumed. */
export const LOOK_BACK_MS = 2 * 60 * 60 * 1000;
/** Version of the database. 2: secrets have a store of their own. 3: sessions have secrets. */
const VERSION = 3;
const STREAM_STORES = ["streams", "secrets", "commands"];
/** Limit for a read. A tab that hangs in a transaction blocks all others; Chromium ends it after a minute. */
const READ_WITHIN_MS = 5000;
/** Names of the errors of a database that the browser has closed: for new requests, and for running ones. */
const CLOSED = new Set(["InvalidStateError", "AbortError"]);

/** Storage in memory: for tests, and for browsers that refuse IndexedDB. */
export class MemoryStorage {
  isDurable = false;
  #streams = new Map();
  #secrets = new Map();
  #commands = new Map();
  #sessions = new Map();
  #worked = new Map();

  async apply(writes) {
    for (const { op, value, key, accepted } of writes) {
      if (op === "stream") this.#streams.set(value.key, structuredClone(value));
      if (op === "secret") this.#secrets.set(value.key, { ...value });
      if (op === "command") this.#commands.set(`${value.key} ${value.seqno}`, { ...value });
      if (op === "delete") this.#streams.delete(key);
      if (op === "delete") this.#secrets.delete(key);
      if (op === "acked" || op === "delete") {
        const below = op === "delete" ? Infinity : accepted;
        for (const [id, command] of this.#commands)
          if (command.key === key && command.seqno < below) this.#commands.delete(id);
      }
    }
  }

  async load() {
    const [streams, secrets, commands] = [this.#streams, this.#secrets, this.#commands].map((map) => [...map.values()]);
    return { streams, secrets, commands };
  }

  async updateSecret(server, session, change) {
    const id = JSON.stringify([server, session]);
    const after = change(this.#sessions.get(id) ?? null);
    if (after === null) this.#sessions.delete(id);
    else this.#sessions.set(id, after);
    return after;
  }

  async loadTransport(server) {
    return this.#worked.get(server) ?? null;
  }

  async storeTransport(server, worked) {
    if (worked === null) this.#worked.delete(server);
    else this.#worked.set(server, worked);
  }
}

/**
 * Storage in IndexedDB. One `apply` is one transaction.
 *
 * A browser may close an open database, as when the user clears the site's data. Then the database is opened again, and
 * the request is repeated once.
 *
 * A transaction is committed with its last request, without waiting for results. Otherwise a page that is frozen between
 * would block the database for every other tab.
 */
export class IndexedStorage {
  isDurable = true;
  #name;
  #database;
  #opening = null; // the promise of the second opening, for all concurrent requests

  constructor(name) {
    this.#name = name;
  }

  /** Open or create the database. Throws if the browser refuses or does not respond. */
  static async open(name = "midstream") {
    const storage = new IndexedStorage(name);
    await storage.#open();
    return storage;
  }

  async #open() {
    const request = indexedDB.open(this.#name, VERSION);
    request.onupgradeneeded = ({ oldVersion }) => createStores(request.result, oldVersion);
    const opened = resultOf(request).then((database) => {
      database.onversionchange = () => database.close();
      return database;
    });
    this.#database = await withTimeout(READ_WITHIN_MS, opened, "the browser did not open its database in time");
  }

  /** Run `act` on the database; run it again if the browser has closed the database. */
  async #run(act) {
    const database = this.#database;
    try {
      return await act(database);
    } catch (error) {
      if (!CLOSED.has(error?.name)) throw error;
    }
    if (this.#database === database) await (this.#opening ??= this.#open().finally(() => (this.#opening = null)));
    return act(this.#database);
  }

  apply(writes) {
    return this.#run((database) => applyWrites(database, writes));
  }

  async load() {
    const [streams, secrets, commands] = await this.#read(STREAM_STORES, (store) => store.getAll());
    return { streams, secrets, commands };
  }

  /**
   * Read the stored secret of a session (or null), store the result of `change`, and return it. A change is one
   * transaction.
   */
  async updateSecret(server, session, change) {
    const [before = null] = await this.#read(["sessions"], (store) => store.get([server, session]));
    if (change(before) === before) return before;
    return this.#run((database) => updateRow(database, [server, session], change));
  }

  /** Return the stored transport of a server, as `{server, transport, until}`, or null. */
  async loadTransport(server) {
    const [known] = await this.#read(["transports"], (store) => store.get(server));
    return known ?? null;
  }

  storeTransport(server, worked) {
    return this.#run((database) => {
      const transaction = database.transaction("transports", "readwrite");
      const done = waitForCommit(transaction);
      const transports = transaction.objectStore("transports");
      if (worked === null) transports.delete(server);
      else transports.put({ server, ...worked });
      transaction.commit();
      return done;
    });
  }

  /** Send one request to each of these stores. Throws if another tab blocks them. */
  #read(names, request) {
    return this.#run((database) => {
      const transaction = database.transaction(names, "readonly");
      const reading = Promise.all(names.map((name) => resultOf(request(transaction.objectStore(name)))));
      transaction.commit();
      return withTimeout(READ_WITHIN_MS, reading, "another tab blocks the database");
    });
  }
}

function createStores(database, oldVersion) {
  database.createObjectStore("sessions", { keyPath: ["server", "session"] });
  if (oldVersion === 2) return;
  for (const former of [...database.objectStoreNames]) if (former !== "sessions") database.deleteObjectStore(former);
  database.createObjectStore("streams", { keyPath: "key" });
  database.createObjectStore("secrets", { keyPath: "key" });
  database.createObjectStore("commands", { keyPath: ["key", "seqno"] });
  database.createObjectStore("transports", { keyPath: "server" });
}

function applyWrites(database, writes) {
  // A command must be on disk before it is sent. A lost cursor only repeats events.
  const durability = writes.some((write) => write.op === "command") ? "strict" : "relaxed";
  const transaction = database.transaction(STREAM_STORES, "readwrite", { durability });
  const done = waitForCommit(transaction);
  const [streams, secrets, commands] = STREAM_STORES.map((name) => transaction.objectStore(name));
  for (const { op, value, key, accepted } of writes) {
    if (op === "stream") streams.put(value);
    if (op === "secret") secrets.put(value);
    if (op === "command") commands.put(value);
    if (op === "acked") commands.delete(IDBKeyRange.bound([key, 0], [key, accepted], false, true));
    if (op === "delete") {
      streams.delete(key);
      secrets.delete(key);
      commands.delete(IDBKeyRange.bound([key, 0], [key, Infinity]));
    }
  }
  transaction.commit();
  return done;
}

/** Change the stored secret of a session in one transaction, and return the result. */
async function updateRow(database, [server, session], change) {
  const transaction = database.transaction("sessions", "readwrite", { durability: "strict" });
  const sessions = transaction.objectStore("sessions");
  const done = waitForCommit(transaction);
  let after = null;
  const reading = sessions.get([server, session]); // another tab may have changed it since
  reading.onsuccess = () => {
    const found = reading.result ?? null;
    after = change(found);
    if (after === null) sessions.delete([server, session]);
    else if (after !== found) sessions.put({ ...after, server, session });
    transaction.commit();
  };
  await done;
  return after;
}

function waitForCommit(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error ?? new DOMException("the database was closed", "AbortError"));
  });
}

/** Return the result of a promise; throw if it takes longer than `milliseconds`. */
function withTimeout(milliseconds, promise, message) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(() => reject(new MidstreamError("storage", message, "later")), milliseconds);
    promise.then(resolve, reject).finally(() => clearTimeout(timer));
  });
}

function resultOf(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () =>
      reject(new MidstreamError("storage", "another page holds an older database open"));
  });
}

/**
 * Sort the stored data into streams to resume and keys to delete. Deleted are streams past the look-back, streams without a
 * command, and rows without a stream. A command that cannot be read is replaced by a filler. A stream has `damage` if its
 * message is lost before any event was handled, or if its secret is gone (STREAM-48, STREAM-76).
 */
export function sortInterrupted({ streams, secrets, commands }, now, lookBackMs = LOOK_BACK_MS) {
  const known = new Map(streams.map((stream) => [stream.key, { ...stream, commands: [] }]));
  const orphans = new Set();
  for (const { key, secret } of secrets) {
    if (known.has(key)) known.get(key).secret = secret;
    else orphans.add(key);
  }
  for (const command of commands) {
    if (known.has(command.key)) known.get(command.key).commands.push(command);
    else orphans.add(command.key);
  }
  for (const stream of known.values()) {
    if (stream.nextSeqno === 0 || now - stream.touchedAt > lookBackMs) orphans.add(stream.key);
    else known.set(stream.key, restoreCommands(stream));
  }
  return {
    interrupted: [...known.values()].filter((stream) => !orphans.has(stream.key)),
    orphans: [...orphans],
  };
}
