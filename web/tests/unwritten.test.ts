import "fake-indexeddb/auto";
import { expect, it, vi } from "vitest";
import { newAnswer, textOf, type Message } from "../src/store/messages";
import { append, EMPTY, path, ROOT, update } from "../src/store/tree";
import { storage } from "./storage";

vi.stubGlobal("navigator", { languages: ["en"] });
vi.stubGlobal("localStorage", storage());

const said = (text: string): Message => ({ role: "user", text, files: [], created: 0 });
const answer = (text: string): Message => ({ ...newAnswer("m", 0), parts: [{ kind: "text", text, tokens: [] }] });
const start = append(append(EMPTY, ROOT, "a", said("a")), "a", "b", answer("one"));

/** The store of a page that has just been opened. */
async function open() {
  vi.resetModules();
  return import("../src/store/conversations");
}

it("has after a reload what was said in the last moments, as a stopped answer", async () => {
  const before = await open();
  const { id } = before.createConversation(undefined, "T", start);
  await before.writeAll();
  before.changeTree(id, (tree) => update(tree, "b", () => answer("one two")));
  before.keepUnwritten();
  const kept = JSON.parse(localStorage.getItem(`jaxllm.unwritten.${id}`)!) as { tree: { nodes: object } };
  expect(Object.keys(kept.tree.nodes)).toEqual(["b"]);
  const after = await open();
  const shown = path((await after.loadConversation(id))!.tree);
  expect(shown.map(({ message }) => textOf(message))).toEqual(["a", "one two"]);
  expect(shown.at(-1)!.message).toMatchObject({ state: "stopped" });
  expect(Object.keys(localStorage)).toEqual([]);
});

it("keeps nothing of what is written, and a conversation that never was", async () => {
  const before = await open();
  const written = before.createConversation(undefined, "T", start);
  await before.writeAll();
  const begun = before.createConversation(undefined, "New", start);
  before.keepUnwritten();
  expect(Object.keys(localStorage)).toEqual([`jaxllm.unwritten.${begun.id}`]);
  expect(written.id).not.toBe(begun.id);
  const after = await open();
  await after.loadEntries();
  expect(after.useConversations.getState().entries!.map(({ title }) => title)).toContain("New");
});

it("leaves out pictures that are written, which stay in the conversation", async () => {
  const before = await open();
  const pictures = [{ name: "a.png", url: "data:image/png;base64,AAAA" }];
  const { id } = before.createConversation(undefined, "T", append(EMPTY, ROOT, "a", { ...said("a"), pictures } as Message));
  await before.writeAll();
  before.changeTree(id, (tree) => append(tree, "a", "b", answer("one")));
  before.keepUnwritten();
  expect(localStorage.getItem(`jaxllm.unwritten.${id}`)).not.toContain("AAAA");
  const after = await open();
  const shown = path((await after.loadConversation(id))!.tree);
  expect(shown.map(({ message }) => textOf(message))).toEqual(["a", "one"]);
  expect(shown[0]!.message).toMatchObject({ pictures });
  expect(shown[0]!.revision ?? 0).toBe(0);
});

it("brings back no conversation that another tab has deleted, and no older name", async () => {
  const [one, other] = [await open(), await open()];
  const gone = one.createConversation(undefined, "Gone", start);
  const renamed = one.createConversation(undefined, "Old", start);
  await one.writeAll();
  for (const { id } of [gone, renamed]) one.changeTree(id, (tree) => update(tree, "b", () => answer("one two")));
  one.keepUnwritten();
  await other.removeConversation(gone.id);
  await other.loadConversation(renamed.id);
  other.change(renamed.id, (at) => ({ ...at, title: "New", updated: at.updated + 60_000 }));
  await other.writeAll();
  const after = await open();
  expect(await after.loadConversation(gone.id)).toBeNull();
  const found = (await after.loadConversation(renamed.id))!;
  expect(found.title).toBe("New");
  expect(textOf(path(found.tree).at(-1)!.message)).toBe("one two");
});

it("lists the conversations where what was kept cannot be read, and says so", async () => {
  const before = await open();
  before.createConversation(undefined, "Kept", start);
  await before.writeAll();
  localStorage.setItem("jaxllm.unwritten.x", "{");
  const after = await open();
  await after.loadEntries();
  expect(after.useConversations.getState().entries!.map(({ title }) => title)).toContain("Kept");
  expect(after.useConversations.getState().problem).toContain("SyntaxError");
  localStorage.removeItem("jaxllm.unwritten.x");
});
