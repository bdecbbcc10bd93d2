/**
 * What is kept over a reload: streams, what proves that they are ours, the commands that nobody has acknowledged, the
 * secrets of sessions, and which transport worked.
 *
 * A write is `{op: "stream", value}`, `{op: "secret", value}`, `{op: "command", value}`, `{op: "acked", key, accepted}`
 * (commands below that number are in the server's journal) or `{op: "forget", key}`.
 */

import { MidstreamError, mended } from "./stream.js";

/** How long after its last sign of life an interrupted stream is taken up again. */
export const LOOK_BACK_MS = 2 * 60 * 60 * 1000;
/** 2: secrets stand apart; all that is of before is older than the look-back. 3: sessions have secrets. */
const VERSION = 3;
const KEPT = ["streams", "secrets", "commands"];
/** For something to be read: a tab that hangs in the middle of a change holds all others up (Chromium ends it after a minute). */
const READ_WITHIN_MS = 5000;
/** What a database says that the browser has closed: to who asks it, and to what was under way. */
const CLOSED = new Set(["InvalidStateError", "AbortError"]);

/** Keeps it all in memory: for tests, and where a browser refuses IndexedDB. */
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
      if (op === "forget") this.#streams.delete(key);
      if (op === "forget") this.#secrets.delete(key);
      if (op === "acked" || op === "forget") {
        const below = op === "forget" ? Infinity : accepted;
        for (const [id, command] of this.#commands)
          if (command.key === key && command.seqno < below) this.#commands.delete(id);
      }
    }
  }

  async load() {
    const [streams, secrets, commands] = [this.#streams, this.#secrets, this.#commands].map((map) => [...map.values()]);
    return { streams, secrets, commands };
  }

  async sessionSecret(server, session, change) {
    const id = JSON.stringify([server, session]);
    const after = change(this.#sessions.get(id) ?? null);
    if (after === null) this.#sessions.delete(id);
    else this.#sessions.set(id, after);
    return after;
  }

  async worked(server) {
    return this.#worked.get(server) ?? null;
  }

  async remember(server, worked) {
    if (worked === null) this.#worked.delete(server);
    else this.#worked.set(server, worked);
  }
}

/**
 * Keeps it in IndexedDB. One `apply` is one transaction.
 *
 * A browser may close a database that is open (its site's data are cleared, its own process died): it is opened again, with
 * what is there then, and what was asked is asked once more.
 *
 * A transaction is committed with its last request, and not when this page hears of the answers: a page that is frozen
 * in between would keep every other tab from what is kept.
 */
export class IndexedStorage {
  isDurable = true;
  #name;
  #database;
  #opening = null; // again, for all that ask meanwhile

  constructor(name) {
    this.#name = name;
  }

  /** Open (or make) the database; throws where the browser refuses, or does not answer. */
  static async open(name = "midstream") {
    const storage = new IndexedStorage(name);
    await storage.#open();
    return storage;
  }

  async #open() {
    const request = indexedDB.open(this.#name, VERSION);
    request.onupgradeneeded = ({ oldVersion }) => makeStores(request.result, oldVersion);
    const opened = answered(request).then((database) => {
      database.onversionchange = () => database.close();
      return database;
    });
    this.#database = await within(READ_WITHIN_MS, opened, "the browser does not open its database");
  }

  /** Do something with the database, and once more where the browser has closed it. */
  async #with(act) {
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
    return this.#with((database) => applied(database, writes));
  }

  async load() {
    const [streams, secrets, commands] = await this.#read(KEPT, (store) => store.getAll());
    return { streams, secrets, commands };
  }

  /**
   * Read what is kept of a session's secret (null: nothing), write down what `change` makes of that, and return it. Where it
   * changes anything that is one transaction.
   */
  async sessionSecret(server, session, change) {
    const [before = null] = await this.#read(["sessions"], (store) => store.get([server, session]));
    if (change(before) === before) return before;
    return this.#with((database) => changed(database, [server, session], change));
  }

  /** Return `{server, transport, until}` of what worked at a server, or null. */
  async worked(server) {
    const [known] = await this.#read(["transports"], (store) => store.get(server));
    return known ?? null;
  }

  remember(server, worked) {
    return this.#with((database) => {
      const transaction = database.transaction("transports", "readwrite");
      const done = committed(transaction);
      const transports = transaction.objectStore("transports");
      if (worked === null) transports.delete(server);
      else transports.put({ server, ...worked });
      transaction.commit();
      return done;
    });
  }

  /** Ask each of these stores for one thing; throws where another tab holds them. */
  #read(names, ask) {
    return this.#with((database) => {
      const transaction = database.transaction(names, "readonly");
      const reading = Promise.all(names.map((name) => answered(ask(transaction.objectStore(name)))));
      transaction.commit();
      return within(READ_WITHIN_MS, reading, "another tab holds what this browser keeps");
    });
  }
}

function makeStores(database, oldVersion) {
  database.createObjectStore("sessions", { keyPath: ["server", "session"] });
  if (oldVersion === 2) return;
  for (const former of [...database.objectStoreNames]) if (former !== "sessions") database.deleteObjectStore(former);
  database.createObjectStore("streams", { keyPath: "key" });
  database.createObjectStore("secrets", { keyPath: "key" });
  database.createObjectStore("commands", { keyPath: ["key", "seqno"] });
  database.createObjectStore("transports", { keyPath: "server" });
}

function applied(database, writes) {
  // A command must be on the disk before it is sent; a cursor may be lost, and events come twice.
  const durability = writes.some((write) => write.op === "command") ? "strict" : "relaxed";
  const transaction = database.transaction(KEPT, "readwrite", { durability });
  const done = committed(transaction);
  const [streams, secrets, commands] = KEPT.map((name) => transaction.objectStore(name));
  for (const { op, value, key, accepted } of writes) {
    if (op === "stream") streams.put(value);
    if (op === "secret") secrets.put(value);
    if (op === "command") commands.put(value);
    if (op === "acked") commands.delete(IDBKeyRange.bound([key, 0], [key, accepted], false, true));
    if (op === "forget") {
      streams.delete(key);
      secrets.delete(key);
      commands.delete(IDBKeyRange.bound([key, 0], [key, Infinity]));
    }
  }
  transaction.commit();
  return done;
}

/** Change what is kept of a session's secret in one transaction; return it as it is then. */
async function changed(database, [server, session], change) {
  const transaction = database.transaction("sessions", "readwrite", { durability: "strict" });
  const sessions = transaction.objectStore("sessions");
  const done = committed(transaction);
  let after = null;
  const reading = sessions.get([server, session]); // another tab may have been faster
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

function committed(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error ?? new DOMException("the database was closed", "AbortError"));
  });
}

/** Return what is promised, or throw where it takes longer. */
function within(milliseconds, promise, message) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(() => reject(new MidstreamError("storage", message, "later")), milliseconds);
    promise.then(resolve, reject).finally(() => clearTimeout(timer));
  });
}

function answered(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () =>
      reject(new MidstreamError("storage", "another page holds an older database open"));
  });
}

/**
 * Sort what was kept into streams to take up again and keys to forget: those past the look-back, those that said
 * nothing, and parts of what is not there. A command that cannot be read costs what stood in it; a stream whose message is
 * lost before any event was handled, or whose secret is gone, has `damage` (STREAM-48, STREAM-76).
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
    else known.set(stream.key, mended(stream));
  }
  return {
    interrupted: [...known.values()].filter((stream) => !orphans.has(stream.key)),
    orphans: [...orphans],
  };
}
