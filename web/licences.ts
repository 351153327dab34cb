import { existsSync, readdirSync, readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import type { Plugin } from "vite";

/** The folder of the package that a bundled module comes from; null for our own. */
function packageOf(id: string): string | null {
  const at = id.lastIndexOf("/node_modules/");
  if (at < 0) return null;
  for (let folder = dirname(id.split("?")[0]!); folder.length > at; folder = dirname(folder)) {
    const file = join(folder, "package.json");
    if (existsSync(file) && JSON.parse(readFileSync(file, "utf8")).version) return folder;
  }
  return null;
}

/** A package's name, and the text of its licence. */
function licenceOf(folder: string): [string, string] {
  const { name, version, license, author } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
  const file = readdirSync(folder).sort().find((entry) => /^licen[cs]e/i.test(entry));
  const by = typeof author === "string" ? author : author?.name;
  const text = file ? readFileSync(join(folder, file), "utf8").trim().replaceAll("\r\n", "\n") : [`Licence: ${license}`, by].filter(Boolean).join("\n");
  return [`${name} ${version} (${license})`, text];
}

/** Write the licences of every package that has code or a style sheet in the bundle, each text once. */
export function licences(fileName: string): Plugin {
  return {
    name: "licences",
    generateBundle(_, bundle) {
      const chunks = Object.values(bundle).filter((output) => output.type === "chunk");
      const used = chunks.flatMap((chunk) => Object.entries(chunk.modules).filter(([id, { renderedLength }]) => renderedLength > 0 || id.includes(".css")));
      const folders = new Set(used.map(([id]) => packageOf(id)).filter((folder) => folder !== null));
      const packages = new Map<string, Set<string>>();
      for (const [name, text] of [...folders].map(licenceOf)) packages.set(text, (packages.get(text) ?? new Set()).add(name));
      const parts = [...packages].map(([text, names]) => `${[...names].sort().join("\n")}\n\n${text}\n`).sort();
      const head = "The page contains code of these packages.\n";
      this.emitFile({ type: "asset", fileName, source: [head, ...parts].join(`\n${"-".repeat(80)}\n\n`) });
    },
  };
}
