// The Durable Streams reference server, in memory, as `bench.streaming` starts it: on a free port of loopback, which it
// prints. BENCH_NODE_DIR is the folder where its npm package was installed.
import { createRequire } from "node:module"
import { pathToFileURL } from "node:url"

const there = createRequire(`${process.env.BENCH_NODE_DIR}/`).resolve("@durable-streams/server")
const { DurableStreamTestServer } = await import(pathToFileURL(there).href)
const server = new DurableStreamTestServer({ port: 0, host: "127.0.0.1", webhooks: false })
console.log(new URL(await server.start()).port)
