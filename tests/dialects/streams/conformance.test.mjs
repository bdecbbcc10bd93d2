// The published command finds no tests: its function is called from a file of vitest's. STREAMS_URL is the server to judge.
import { runConformanceTests } from "@durable-streams/server-conformance-tests"

runConformanceTests({ baseUrl: process.env.STREAMS_URL, subscriptions: true, longPollTimeoutMs: Number(process.env.STREAMS_LONG_POLL_MS ?? 20000) })
