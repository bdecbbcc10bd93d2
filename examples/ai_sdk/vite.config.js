import react from "@vitejs/plugin-react";
import { defineConfig } from "vite";

// The page and `midstream serve` have one origin, as behind a proxy in production. A page of another origin needs
// `--allow-origin`. So the proxy must pass on the host name of the browser.
const target = process.env.MIDSTREAM_URL ?? "http://127.0.0.1:8000";

// If the connection to the server is lost in the middle of an answer, Vite's proxy does not close the response by itself.
const configure = (proxy) =>
  proxy.on("proxyRes", (answer, _, response) => answer.once("close", () => answer.complete || response.destroy()));

export default defineConfig({
  plugins: [react()],
  server: { proxy: { "/v1": { target, changeOrigin: false, configure } } },
});
