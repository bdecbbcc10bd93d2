/**
 * A JavaScript client that lives for the whole soak: `node --expose-gc tests/soak/soak_client.mjs URL`.
 *
 * Answers each line `NAME COUNT` of stdin with its gauges after COUNT turns in new sessions, ten at a time.
 */

import { readdirSync } from "node:fs";
import { createInterface } from "node:readline";

import { connect } from "../../src/midstream/server/static/client/midstream.js";

const AT_ONCE = 10;

const client = await connect({ url: process.argv[2], transport: "sse" });
let done = 0;

async function turns(name, count) {
  const last = done + count;
  const asking = Array.from({ length: AT_ONCE }, async () => {
    while (done < last) {
      done += 1;
      const answer = await client.ask(`js-${name}-${done}`, "Look at it.");
      if (!answer.endsWith("word by word.")) throw new Error(answer);
    }
  });
  await Promise.all(asking);
}

function descriptors() {
  try {
    return readdirSync("/proc/self/fd").length;
  } catch {
    return null;
  }
}

function gauges() {
  globalThis.gc();
  const { heapUsed, external } = process.memoryUsage();
  const active = process.getActiveResourcesInfo();
  const timers = active.filter((each) => each === "Timeout").length;
  return {
    turns: done,
    anonymous_bytes: heapUsed + external,
    descriptors: descriptors(),
    tasks: active.length - timers,
    timers,
    objects: 0,
    cyclic: 0,
  };
}

console.log("ready");
for await (const line of createInterface({ input: process.stdin })) {
  const [name, count] = line.split(" ");
  await turns(name, Number(count));
  console.log(JSON.stringify(gauges()));
}
client.close();
