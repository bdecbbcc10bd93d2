// The Durable Streams reference server, with its files in DATA_DIR. It serves on a free port of the loopback interface,
// and prints the port.
import { createRequire } from "node:module"
import { pathToFileURL } from "node:url"
import path from "node:path"

console.log = console.info = () => {} // the server logs to stdout, where only the port may be
const require = createRequire(path.resolve(process.env.DURABLE_STREAMS) + "/")
const module_ = await import(pathToFileURL(require.resolve("@durable-streams/server")).href)
const server = new module_.DurableStreamTestServer({
  port: 0,
  host: "127.0.0.1",
  dataDir: process.env.DATA_DIR,
  webhooks: false,
})
const url = await server.start()
process.stdout.write(`${new URL(url).port}\n`)
