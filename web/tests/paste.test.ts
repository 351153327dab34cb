import { expect, it } from "vitest";
import { freeName, isLong } from "../src/chat/paste";

it.each([
  ["a sentence", false],
  ["x".repeat(3999), false],
  ["x".repeat(4000), true],
  ["line\n".repeat(60), true],
  ["line\n".repeat(59), false],
])("tells a long paste from a short one", (text, long) => expect(isLong(text)).toBe(long));

it("gives each paste a name of its own", () => {
  const files = ["pasted.txt", "pasted-2.txt", "notes"].map((name) => ({ name, text: "" }));
  expect(["pasted.txt", "other.txt", "notes"].map((name) => freeName(name, files))).toEqual(["pasted-3.txt", "other.txt", "notes-2"]);
});
