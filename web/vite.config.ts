import react from "@vitejs/plugin-react";
import { defineConfig } from "vitest/config";
import { licences } from "./licences.ts";

/** KaTeX names each font in three formats, of which every browser that runs this page takes the first. */
const woff2Only = {
  name: "woff2-only",
  enforce: "pre" as const,
  transform(code: string, id: string) {
    return id.includes("katex") && id.endsWith(".css") ? code.replace(/,url\([^)]*\.(woff|ttf)\) format\("[a-z]+"\)/g, "") : null;
  },
};

export default defineConfig({
  base: "./",
  plugins: [react(), woff2Only, licences("THIRD-PARTY-LICENCES.txt")],
  build: {
    outDir: "../jaxllm/serving/web/static",
    emptyOutDir: true,
    target: "es2022",
    assetsInlineLimit: 0, // the page's policy allows no data: fonts
    modulePreload: { polyfill: false },
    chunkSizeWarningLimit: 2000,
    rollupOptions: {
      output: {
        // Without hashes: the server sends ETags, and a new build changes the files whose content changed.
        entryFileNames: "assets/[name].js",
        chunkFileNames: "assets/[name].js",
        assetFileNames: "assets/[name][extname]",
      },
    },
  },
  server: { proxy: Object.fromEntries(["/v1", "/metrics", "/health", "/load", "/version", "/ready"].map((path) => [path, "http://127.0.0.1:8000"])) },
  test: { include: ["tests/**/*.test.ts"] },
});
