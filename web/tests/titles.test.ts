import { expect, it, vi } from "vitest";

vi.stubGlobal("navigator", { languages: ["en"] });

it.each([
  ["Trees", ["Trees"], "Trees (2)"],
  ["Trees", ["Trees", "Trees (2)"], "Trees (3)"],
  ["Trees (3)", ["Trees", "Trees (3)"], "Trees (2)"],
  ["", [], ""],
])("numbers the branches of %j among %j", async (title, titles, expected) => {
  const { branchTitle } = await import("../src/store/conversations");
  expect(branchTitle(title, titles)).toBe(expected);
});
