import "fake-indexeddb/auto";
import { describe, expect, it, vi } from "vitest";
import { newAnswer, type Message } from "../src/store/messages";
import { storage } from "./storage";
import { append, EMPTY, merge, path, remove, ROOT, update } from "../src/store/tree";

const said = (text: string): Message => ({ role: "user", text, files: [], created: 0 });
const answer = (text: string, state: "running" | "done"): Message => ({ ...newAnswer("m", 0), state, parts: [{ kind: "text", text, tokens: [] }] });
const start = append(EMPTY, ROOT, "a", said("a"));

describe("merging what two tabs have said", () => {
  const ours = append(start, "a", "b", said("b"));
  const theirs = append(append(start, "a", "c", said("c")), "c", "d", said("d"));

  it("keeps all turns, and shows ours", () => {
    const both = merge(ours, theirs);
    expect(Object.keys(both.nodes).sort()).toEqual(["a", "b", "c", "d"]);
    expect(path(both).map(({ id }) => id)).toEqual(["a", "b"]);
    expect(path(merge(start, theirs)).map(({ id }) => id)).toEqual(["a", "c", "d"]);
    expect(merge(both, theirs)).toBe(both);
  });

  it("brings back nothing that was deleted", () => {
    const both = merge(ours, remove(theirs, "c"));
    expect(Object.keys(both.nodes).sort()).toEqual(["a", "b"]);
    expect(Object.keys(merge(theirs, both).nodes).sort()).toEqual(["a", "b"]);
  });

  it("takes the answer that has come further", () => {
    const short = append(start, "a", "x", answer("one", "running"));
    const long = update(short, "x", () => answer("one two", "done"));
    for (const both of [merge(short, long), merge(long, short)]) expect(both.nodes.x!.message).toEqual(answer("one two", "done"));
    const over = update(short, "x", () => answer("one", "done"));
    for (const both of [merge(short, over), merge(over, short)]) expect(both.nodes.x!.message).toEqual(answer("one", "done"));
  });
});

it("takes no older copy of an answer for a newer one, whatever their lengths", () => {
  const call = (state: "asking" | "running", id: string): Message => ({
    ...newAnswer("m", 0), parts: [{ kind: "call", id, server: "s", name: "n", arguments: "{}", state, output: null, error: null, approval: "mcpr_1" }],
  });
  const kept = append(start, "a", "x", call("asking", "mcpr_1"));
  const now = update(kept, "x", () => call("running", "mcp_1"));
  expect(merge(now, kept)).toBe(now);
  expect(merge(kept, now).nodes.x!.message).toEqual(call("running", "mcp_1"));
});

describe("two tabs of one conversation", () => {
  vi.stubGlobal("localStorage", storage());
  vi.stubGlobal("navigator", { languages: ["en"] });
  const tab = async () => {
    vi.resetModules();
    return import("../src/store/conversations");
  };

  it("lose no turn, and see each other's", async () => {
    const [first, second] = [await tab(), await tab()];
    const { id } = first.createConversation(undefined, "Both", start);
    await first.writeAll();
    expect((await second.loadConversation(id))?.title).toBe("Both");
    first.changeTree(id, (tree) => append(tree, "a", "b", said("b")));
    second.changeTree(id, (tree) => append(tree, "a", "c", said("c")));
    await Promise.all([first.writeAll(), second.writeAll()]);
    for (const store of [first, second]) {
      await vi.waitFor(() => expect(Object.keys(store.useConversations.getState().loaded[id]!.tree.nodes).sort()).toEqual(["a", "b", "c"]));
    }
    const third = await tab();
    expect(Object.keys((await third.loadConversation(id))!.tree.nodes).sort()).toEqual(["a", "b", "c"]);
    await first.removeConversation(id);
    await vi.waitFor(() => expect(second.useConversations.getState().loaded[id]).toBeUndefined());
  });
});
