/** What a client has on disk. A write is there before the next action. */
import { randomBytes } from "node:crypto";
import fs from "node:fs";
import { join } from "node:path";

/** A stream that was written to longer ago cannot be resumed any more. */
export const LOOK_BACK_MS = 2 * 3600 * 1000;

/** Replace a file in one step. It is on disk before this returns. */
export function write(file, text) {
  const descriptor = fs.openSync(`${file}.new`, "w", 0o600);
  fs.writeSync(descriptor, text);
  fs.fsyncSync(descriptor);
  fs.closeSync(descriptor);
  fs.renameSync(`${file}.new`, file);
}

/** What one stream stores in a folder: its checkpoint and, in a file of its own, its secret. */
export class Checkpoint {
  constructor(folder) {
    fs.mkdirSync(folder, { recursive: true });
    [this.file, this.secretFile] = [join(folder, "checkpoint.json"), join(folder, "secret")];
  }
  get isThere() {
    return fs.existsSync(this.file);
  }
  begin(session, payload) {
    write(this.secretFile, randomBytes(32).toString("base64url"));
    const key = randomBytes(16).toString("hex");
    const commands = { unacked: { 0: JSON.stringify(payload) }, next_seqno: 1, acked: 0 };
    const events = { cursor: null, promised: null, known: null, turn: 0, shown: {} };
    this.save({ session, key, connection: 0, ...commands, ...events });
    return this.load();
  }
  /** Return what an earlier process left; null where that is nothing, or cannot be resumed. */
  load() {
    if (!fs.existsSync(this.file) || !fs.existsSync(this.secretFile)) return this.remove();
    const kept = JSON.parse(fs.readFileSync(this.file, "utf8"));
    if (Date.now() - kept.touched_at > LOOK_BACK_MS) return this.remove();
    return { ...kept, secret: fs.readFileSync(this.secretFile, "utf8") };
  }
  save({ secret: _, ...kept }) {
    write(this.file, JSON.stringify({ ...kept, touched_at: Date.now() }));
  }
  remove() {
    for (const file of [this.file, this.secretFile]) fs.rmSync(file, { force: true });
    return null;
  }
}
