import { describe, expect, it } from "vitest";
import { textOf } from "../src/store/messages";
import { importText } from "../src/store/transfer";
import { path, place, step, type Tree } from "../src/store/tree";

let next = 0;
const newId = () => `new${next++}`;
const read = (file: unknown) => importText(JSON.stringify(file), newId);
const shown = (tree: Tree) => path(tree).map(({ message }) => textOf(message));

/** As ChatGPT writes a node. */
function node(id: string, parent: string | null, role: string, content: object | string | null, more: object = {}) {
  const message = content === null ? null : { author: { role }, create_time: 100, recipient: "all", metadata: {}, content: typeof content === "string" ? { content_type: "text", parts: [content] } : content, ...more };
  return [id, { id, parent, children: [], message }] as const;
}

const CHATGPT = {
  title: "Trees", create_time: 90.5, update_time: 120, conversation_id: "x", current_node: "a2",
  mapping: Object.fromEntries([
    node("r", null, "", null),
    node("s", "r", "system", "", { metadata: { is_visually_hidden_from_conversation: true } }),
    node("c", "s", "user", { content_type: "user_editable_context", user_profile: "me" }, { metadata: { is_visually_hidden_from_conversation: true } }),
    node("u", "c", "user", "Which tree?"),
    node("t", "u", "assistant", { content_type: "thoughts", thoughts: [{ summary: "Trees", content: "An oak or a beech." }] }),
    node("w", "t", "assistant", { content_type: "code", text: "search('oak')" }, { recipient: "web.run" }),
    node("x", "w", "tool", { content_type: "execution_output", text: "found" }),
    node("a", "x", "assistant", "An oak.", { metadata: { model_slug: "gpt-x" } }),
    node("u2", "a", "user", { content_type: "multimodal_text", parts: [{ content_type: "image_asset_pointer" }, "This one?"] }),
    node("a2", "u2", "assistant", "Yes."),
    node("a3", "u2", "assistant", "No."),
    node("b", "u", "assistant", "A beech."),
  ]),
};

describe("ChatGPT's conversations.json", () => {
  it("is read with its branches, thoughts and what was shown last", () => {
    const [conversation] = read([CHATGPT]);
    const { tree, title, created, updated } = conversation!;
    expect({ title, created, updated }).toEqual({ title: "Trees", created: 90_500, updated: 120_000 });
    expect(shown(tree)).toEqual(["Which tree?", "An oak.", "[image_asset_pointer]\n\nThis one?", "Yes."]);
    const [, oak, , yes] = path(tree);
    expect(oak!.message).toMatchObject({ role: "assistant", model: "gpt-x", state: "done", parts: [{ kind: "reasoning", text: "Trees\n\nAn oak or a beech." }, { kind: "text" }] });
    expect(place(tree, yes!.id)).toEqual({ index: 0, count: 2 });
    expect(shown(step(tree, yes!.id, 1)).at(-1)).toBe("No.");
    expect(shown(step(tree, oak!.id, 1))).toEqual(["Which tree?", "A beech."]);
    expect(Object.keys(tree.nodes)).toHaveLength(6);
  });

  it("keeps answers apart that branch behind a call", () => {
    const mapping = Object.fromEntries([
      node("u", null, "user", "?"),
      node("p", "u", "assistant", "Let me see."),
      node("x1", "p", "tool", "1"), node("a1", "x1", "assistant", "One."),
      node("x2", "p", "tool", "2"), node("a2", "x2", "assistant", "Two."),
    ]);
    const { tree } = read([{ title: null, mapping, current_node: "a1" }])[0]!;
    expect(shown(tree)).toEqual(["?", "Let me see.", "One."]);
    expect(shown(step(tree, path(tree).at(-1)!.id, 1))).toEqual(["?", "Let me see.", "Two."]);
  });

  it("is refused where the messages are no tree", () => {
    const mapping = Object.fromEntries([node("a", "b", "user", "1"), node("b", "a", "user", "2")]);
    expect(() => read([CHATGPT, { mapping }])).toThrow("item 1 cannot be read: its messages are no tree");
  });
});

describe("Open WebUI's export", () => {
  const THOUGHT = '<details type="reasoning" done="true" duration="3">\n<summary>Thought for 3 seconds</summary>\n&gt; Is 1 &lt; 2?\n&gt; Yes.\n</details>\nIt is.';
  const messages = {
    u: { id: "u", parentId: null, childrenIds: ["a", "b"], role: "user", content: "Is it?", timestamp: 100, files: [{ name: "n.txt", file: { data: { content: "1 < 2" } } }, { type: "image", url: "data:" }] },
    a: { id: "a", parentId: "u", childrenIds: [], role: "assistant", content: THOUGHT, model: "m", timestamp: 101 },
    b: { id: "b", parentId: "u", childrenIds: ["c"], role: "assistant", content: "No.", model: "m", timestamp: 102 },
    c: { id: "c", parentId: "b", childrenIds: [], role: "user", content: "Sure?", timestamp: 103 },
  };
  const chat = { id: "1", title: "Sums", created_at: 90, updated_at: 120, pinned: true, chat: { params: { system: "Be brief." }, history: { messages, currentId: "a" } } };

  it("is read with its branches, thoughts, files and system prompt", () => {
    const [conversation] = read([chat]);
    expect(conversation).toMatchObject({ title: "Sums", pinned: true, created: 90_000, updated: 120_000, settings: { system: "Be brief." } });
    const { tree } = conversation!;
    expect(shown(tree)).toEqual(["Is it?", "It is."]);
    const [asked, answer] = path(tree);
    expect(asked!.message).toMatchObject({ files: [{ name: "n.txt", text: "1 < 2" }] });
    expect(answer!.message).toMatchObject({ parts: [{ kind: "reasoning", text: "Is 1 < 2?\nYes.", started: 0, ended: 3000 }, { kind: "text", text: "It is." }] });
    expect(shown(step(tree, answer!.id, 1))).toEqual(["Is it?", "No.", "Sure?"]);
  });
});

it.each([
  ["[{}]", "item 0 of the list is a conversation of neither ChatGPT"],
  ["[]", "the list is empty"],
  ["[1]", "item 0 of the list"],
  ["null", "neither this page, ChatGPT nor Open WebUI"],
])("says of %s what it is not", (text, problem) => expect(() => importText(text, newId)).toThrow(problem));
