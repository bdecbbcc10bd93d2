/**
 * What is kept over a reload: streams, and the chunks that nobody has acknowledged.
 *
 * A write is `{op: "stream", value}`, `{op: "chunk", value}`, `{op: "acked", key, accepted}` (chunks below that
 * number are in the server's journal) or `{op: "forget", key}`.
 */

import { MidstreamError } from "./stream.js";

/** How long after its last sign of life an interrupted stream is taken up again. */
export const LOOK_BACK_MS = 2 * 60 * 60 * 1000;

/** Keeps streams and unacknowledged chunks in memory: for tests, and where a browser refuses IndexedDB. */
export class MemoryStorage {
  isDurable = false;
  #streams = new Map();
  #chunks = new Map();

  async apply(writes) {
    for (const write of writes) {
      if (write.op === "stream") this.#streams.set(write.value.key, structuredClone(write.value));
      if (write.op === "chunk")
        this.#chunks.set(`${write.value.key} ${write.value.seqno}`, { ...write.value });
      if (write.op === "forget") this.#streams.delete(write.key);
      if (write.op === "acked" || write.op === "forget") {
        const below = write.op === "forget" ? Infinity : write.accepted;
        for (const [id, chunk] of this.#chunks) {
          if (chunk.key === write.key && chunk.seqno < below) this.#chunks.delete(id);
        }
      }
    }
  }

  async load() {
    return { streams: [...this.#streams.values()], chunks: [...this.#chunks.values()] };
  }
}

/** Keeps them in IndexedDB. One `apply` is one transaction. */
export class IndexedStorage {
  isDurable = true;
  #database;

  /** Open (or make) the database; throws where the browser refuses. */
  static async open(name = "midstream") {
    const request = indexedDB.open(name, 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("streams", { keyPath: "key" });
      request.result.createObjectStore("chunks", { keyPath: ["key", "seqno"] });
    };
    const storage = new IndexedStorage();
    storage.#database = await answered(request);
    storage.#database.onversionchange = () => storage.#database.close();
    return storage;
  }

  async apply(writes) {
    // A chunk must be on the disk before it is sent; a cursor may be lost, and events come twice.
    const durability = writes.some((write) => write.op === "chunk") ? "strict" : "relaxed";
    const transaction = this.#database.transaction(["streams", "chunks"], "readwrite", { durability });
    const done = new Promise((resolve, reject) => {
      transaction.oncomplete = () => resolve();
      transaction.onabort = () => reject(transaction.error);
    });
    const streams = transaction.objectStore("streams");
    const chunks = transaction.objectStore("chunks");
    for (const write of writes) {
      if (write.op === "stream") streams.put(write.value);
      if (write.op === "chunk") chunks.put(write.value);
      if (write.op === "acked") {
        chunks.delete(IDBKeyRange.bound([write.key, 0], [write.key, write.accepted], false, true));
      }
      if (write.op === "forget") {
        streams.delete(write.key);
        chunks.delete(IDBKeyRange.bound([write.key, 0], [write.key, Infinity]));
      }
    }
    await done;
  }

  async load() {
    const transaction = this.#database.transaction(["streams", "chunks"], "readonly");
    const streams = answered(transaction.objectStore("streams").getAll());
    const chunks = answered(transaction.objectStore("chunks").getAll());
    return { streams: await streams, chunks: await chunks };
  }
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
 * Sort what was kept into streams to take up again and keys to forget: those past the look-back, and halves
 * without the other half.
 */
export function sortInterrupted({ streams, chunks }, now) {
  const known = new Map(streams.map((stream) => [stream.key, { ...stream, chunks: [] }]));
  const orphans = new Set();
  for (const chunk of chunks) {
    if (known.has(chunk.key)) known.get(chunk.key).chunks.push(chunk);
    else orphans.add(chunk.key);
  }
  for (const stream of known.values()) {
    const isEmpty = stream.acked === 0 && stream.chunks.length === 0;
    if (isEmpty || now - stream.touchedAt > LOOK_BACK_MS) orphans.add(stream.key);
  }
  return {
    interrupted: [...known.values()].filter((stream) => !orphans.has(stream.key)),
    orphans: [...orphans],
  };
}
