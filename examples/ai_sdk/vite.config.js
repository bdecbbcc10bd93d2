import react from "@vitejs/plugin-react";
import { defineConfig } from "vite";

// One origin for the page and for `midstream serve`, as behind a proxy in production: a page of another origin needs
// `--allow-origin`. So the server has to see the host name that the browser has.
const target = process.env.MIDSTREAM_URL ?? "http://127.0.0.1:8000";

// Vite's proxy leaves the browser waiting when the server's line breaks in the middle of an answer.
const configure = (proxy) =>
  proxy.on("proxyRes", (answer, _, response) => answer.once("close", () => answer.complete || response.destroy()));

export default defineConfig({
  plugins: [react()],
  server: { proxy: { "/v1": { target, changeOrigin: false, configure } } },
});
