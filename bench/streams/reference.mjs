// The Durable Streams reference server, file-backed in DATA_DIR, on a free port of loopback; it says which.
import { createRequire } from "node:module"
import { pathToFileURL } from "node:url"
import path from "node:path"

console.log = console.info = () => {} // it tells of itself; only the port is for us
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
