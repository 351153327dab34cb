import { expect, it } from "vitest";
import { sends } from "../src/chat/enter";

const enter = { key: "Enter", shiftKey: false, isComposing: false };

it("sends with Enter, but for a new line, a word under composition, and phones", () => {
  expect(sends(enter, false)).toBe(true);
  expect([{ ...enter, shiftKey: true }, { ...enter, isComposing: true }, { ...enter, key: "a" }].some((press) => sends(press, false))).toBe(false);
  expect(sends(enter, true)).toBe(false);
});
