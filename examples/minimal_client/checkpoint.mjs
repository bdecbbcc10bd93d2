/** The data of a client on disk. Each write is on disk before the next action. */
import { randomBytes } from "node:crypto";
import fs from "node:fs";
import { join } from "node:path";

/** A stream whose last write is older cannot be resumed. */
export const LOOK_BACK_MS = 2 * 3600 * 1000;

/** Replace a file atomically. It is on disk before this function returns. */
export function write(file, text) {
  const descriptor = fs.openSync(`${file}.new`, "w", 0o600);
  fs.writeSync(descriptor, text);
  fs.fsyncSync(descriptor);
  fs.closeSync(descriptor);
  fs.renameSync(`${file}.new`, file);
}

/** The stored state of one stream in a folder: its checkpoint, and in separate files its secret and that of the session. */
export class Checkpoint {
  constructor(folder) {
    fs.mkdirSync(folder, { recursive: true });
    [this.file, this.secretFile] = [join(folder, "checkpoint.json"), join(folder, "secret")];
    this.sessionFile = join(folder, "session-secret");
  }
  get isThere() {
    return fs.existsSync(this.file);
  }
  begin(session, payload) {
    const hasSecret = fs.existsSync(this.sessionFile);
    const secret = hasSecret ? fs.readFileSync(this.sessionFile, "utf8") : randomBytes(32).toString("base64url");
    for (const file of [this.sessionFile, this.secretFile]) write(file, secret);
    const key = randomBytes(16).toString("hex");
    const commands = { unacked: { 0: JSON.stringify(payload) }, next_seqno: 1, acked: 0 };
    const events = { cursor: null, promised: null, known: null, turn: 0, shown: {} };
    this.save({ session, key, connection: 0, ...commands, ...events });
    return this.load();
  }
  /** Return the stored state of an earlier process; null if there is none, or if it cannot be resumed. */
  load() {
    if (!fs.existsSync(this.file) || !fs.existsSync(this.secretFile)) return this.remove();
    const kept = JSON.parse(fs.readFileSync(this.file, "utf8"));
    if (Date.now() - kept.touched_at > LOOK_BACK_MS) return this.remove();
    return { ...kept, secret: fs.readFileSync(this.secretFile, "utf8") };
  }
  save({ secret: _, ...kept }) {
    write(this.file, JSON.stringify({ ...kept, touched_at: Date.now() }));
  }
  /** Keep the secret of a session that is encrypted under it; delete that of another one, as the stream has a copy. */
  noteEncryption(isEncrypted, secret) {
    if (!isEncrypted) fs.rmSync(this.sessionFile, { force: true });
    else if (!fs.existsSync(this.sessionFile)) write(this.sessionFile, secret);
  }
  /** Delete the checkpoint and the secret of the stream. That of the session stays. */
  remove() {
    for (const file of [this.file, this.secretFile]) fs.rmSync(file, { force: true });
    return null;
  }
}
