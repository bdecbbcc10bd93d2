// The Durable Streams reference server, in memory, for `bench.streaming`. It serves on a free port of the loopback
// interface, and prints the port. BENCH_NODE_DIR is a folder with its npm package.
import { createRequire } from "node:module"
import { pathToFileURL } from "node:url"

const entry = createRequire(`${process.env.BENCH_NODE_DIR}/`).resolve("@durable-streams/server")
const { DurableStreamTestServer } = await import(pathToFileURL(entry).href)
const server = new DurableStreamTestServer({ port: 0, host: "127.0.0.1", webhooks: false })
console.log(new URL(await server.start()).port)
