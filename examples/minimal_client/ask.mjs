/**
 * Send one message and print its answer:
 *
 *     node --experimental-websocket examples/minimal_client/ask.mjs http://127.0.0.1:8000 my-session "Hello" ./state
 *
 * Run the same command again to continue the stream of an earlier process. Once the answer is whole, the command prints it.
 * Each further message needs a folder of its own. In an encrypted session, copy the file `session-secret` into it first.
 * From version 22 on, Node needs no flag. MIDSTREAM_TOKEN='ORIGIN TOKEN' has the token for one server; no other server gets it.
 */
import fs from "node:fs";
import { join } from "node:path";

import { show, textOf } from "./answer.mjs";
import { Checkpoint, write } from "./checkpoint.mjs";
import { Stream } from "./stream.mjs";

const [url, session, text, folder] = process.argv.slice(2);
const [origin, secret] = (process.env.MIDSTREAM_TOKEN ?? "").split(" ");
const token = secret && new URL(url).origin === origin ? secret : "";
const checkpoint = new Checkpoint(folder);
const answerFile = join(folder, "answer.txt");

if (fs.existsSync(answerFile)) print();
else ask(checkpoint.load() ?? checkpoint.begin(session, { type: "send", parts: [{ type: "text", text }] }));

function ask(kept) {
  let shown = kept.shown;
  const stream = new Stream(url, checkpoint, kept, {
    token,
    onevents(events) {
      for (const event of events) shown = show(shown, event, stream.kept.turn);
      stream.handled(events.at(-1).id, shown);
    },
    onended(code) {
      if (code === null) {
        write(answerFile, textOf(shown)); // before the checkpoint is deleted
        print();
      } else {
        console.error(`The stream ended with ${code}.`);
        process.exitCode = 1;
      }
    },
  });
}

function print() {
  console.log(fs.readFileSync(answerFile, "utf8"));
}
