import { expect, it } from "vitest";
import { DEFAULTS } from "../src/settings/fields";
import type { Conversation } from "../src/store/database";
import type { Picture } from "../src/store/messages";
import { exportText, importText } from "../src/store/transfer";
import { append, EMPTY, ROOT } from "../src/store/tree";

const tree = append(EMPTY, ROOT, "a", { role: "user", text: "Hi", files: [], created: 0 });
const conversation: Conversation = { id: "1", title: "T", pinned: true, created: 1, updated: 2, settings: DEFAULTS, tree };

it("reads what it wrote, under a new id", () => {
  expect(importText(exportText([conversation]), () => "new")).toEqual([{ ...conversation, id: "new" }]);
});

const shown = (pictures: unknown) => ({ ...conversation, tree: append(EMPTY, ROOT, "a", { role: "user", text: "Hi", files: [], pictures: pictures as Picture[], created: 0 }) });

it("keeps pictures", () => {
  const one = shown([{ name: "a.png", url: "data:image/png;base64,AA==" }]);
  expect(importText(exportText([one]), () => "new")).toEqual([{ ...one, id: "new" }]);
});

it.each([
  [exportText([shown([{ name: "a.png", url: "https://example.com/a.png" }])]), "conversations[0]"],
  [exportText([shown([null])]), "conversations[0]"],
  [exportText([shown("a.png")]), "conversations[0]"],
  ["{", "JSON"],
  ["{}", "format is undefined"],
  ['{"format":"jaxllm-conversations","version":2}', "version is 2"],
  ['{"format":"jaxllm-conversations","version":1,"conversations":[{"title":"x"}]}', "conversations[0]"],
  [exportText([{ ...conversation, tree: { ...tree, children: ["a", "b"] } }]), "conversations[0]"],
  [exportText([{ ...conversation, tree: { ...tree, nodes: { a: { ...tree.nodes.a!, children: ["a"] } } } }]), "conversations[0]"],
])("refuses %s", (text, problem) => expect(() => importText(text, () => "new")).toThrow(problem));
