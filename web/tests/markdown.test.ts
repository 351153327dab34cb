import { expect, it } from "vitest";
import { DEFAULTS } from "../src/settings/fields";
import { markdownOf } from "../src/store/markdown";
import { newAnswer, type CallPart } from "../src/store/messages";
import { append, branch, EMPTY, ROOT } from "../src/store/tree";

const NAMES = { you: "You", assistant: "Assistant", untitled: "Untitled" };
const call: CallPart = { kind: "call", id: "c", server: "lab", name: "add", arguments: '{"a": 2}', state: "done", output: "5", error: null, approval: null };

it("writes what is shown, with files, thoughts and calls", () => {
  const asked = append(EMPTY, ROOT, "a", { role: "user", text: "Add them", files: [{ name: "n.txt", text: "2, 3" }], created: 0 });
  const answer = { ...newAnswer("m", 0), parts: [{ kind: "reasoning" as const, text: "Two\n\nnumbers", started: 0, ended: 1 }, call, { kind: "text" as const, text: "It is **5**.", tokens: [] }] };
  const tree = branch(append(asked, "a", "b", newAnswer("m", 0)), "b", "c", answer);
  const conversation = { id: "1", title: "Sums", pinned: false, created: 0, updated: 0, settings: DEFAULTS, tree };
  expect(markdownOf(conversation, NAMES, "inside")).toBe(`# Sums

## You

n.txt:
\`\`\`
2, 3
\`\`\`

Add them

## Assistant

> Two
>
> numbers

\`\`\`
lab: add({"a": 2})
5
\`\`\`

It is **5**.
`);
  expect(markdownOf({ ...conversation, title: "", tree: EMPTY }, NAMES, "inside")).toBe("# Untitled\n");
});

it("has pictures inside, or their names", () => {
  const tree = append(EMPTY, ROOT, "a", { role: "user", text: "Who?", files: [], pictures: [{ name: "a[1].png", url: "data:image/png;base64,AA==" }], created: 0 });
  const conversation = { id: "1", title: "T", pinned: false, created: 0, updated: 0, settings: DEFAULTS, tree };
  expect(markdownOf(conversation, NAMES, "inside")).toContain("\n\n![a\\[1\\].png](data:image/png;base64,AA==)\n\nWho?\n");
  expect(markdownOf(conversation, NAMES, "named")).toContain("\n\n[a\\[1\\].png]\n\nWho?\n");
});
