/** Conversations in this browser's IndexedDB: what the list shows in one store, the trees in another. */

import { openDB, type DBSchema, type IDBPDatabase } from "idb";
import { DEFAULTS, type Settings } from "../settings/fields";
import { ended, textOf } from "./messages";
import { EMPTY, merge, type Tree } from "./tree";

export interface Entry {
  id: string;
  title: string;
  pinned: boolean;
  created: number;
  updated: number;
}

export interface Content {
  id: string;
  settings: Settings;
  tree: Tree;
}

export type Conversation = Entry & Content;

interface Schema extends DBSchema {
  entries: { key: string; value: Entry };
  contents: { key: string; value: Content };
}

let database: Promise<IDBPDatabase<Schema>> | null = null;

function open(): Promise<IDBPDatabase<Schema>> {
  database ??= openDB<Schema>("jaxllm", 1, {
    upgrade(db) {
      db.createObjectStore("entries", { keyPath: "id" });
      db.createObjectStore("contents", { keyPath: "id" });
    },
  });
  return database;
}

export async function listEntries(): Promise<Entry[]> {
  return (await open()).getAll("entries");
}

/** A conversation, as it was kept; an answer that was under way when the page was closed has stopped. */
export async function readConversation(id: string): Promise<Conversation | null> {
  const found = await readAsKept(id);
  return found && { ...found, tree: settled(found.tree) };
}

/** The same with answers under way in another tab, which go on. */
export async function readAsKept(id: string): Promise<Conversation | null> {
  const transaction = (await open()).transaction(["entries", "contents"]);
  const [entry, content] = await Promise.all([transaction.objectStore("entries").get(id), transaction.objectStore("contents").get(id)]);
  return entry && content ? { ...entry, ...content, settings: { ...DEFAULTS, ...content.settings } } : null;
}

/** Keep a conversation together with what another tab has said in it; returns the tree of both. */
export async function writeConversation(conversation: Conversation): Promise<Tree> {
  const { settings, tree, ...entry } = conversation;
  const transaction = (await open()).transaction(["entries", "contents"], "readwrite");
  const kept = await transaction.objectStore("contents").get(entry.id);
  const merged = kept ? merge(tree, kept.tree) : tree;
  await Promise.all([
    transaction.objectStore("entries").put(entry),
    transaction.objectStore("contents").put({ id: entry.id, settings, tree: merged }),
    transaction.done,
  ]);
  return merged;
}

/** Take in what was kept of a conversation, perhaps a part of its messages, unless the conversation has been deleted since. */
export async function restore(kept: Conversation): Promise<void> {
  const { settings: _, tree, ...entry } = kept;
  const before = await readAsKept(kept.id);
  const whole = Object.values(tree.nodes).every((node) => node.children.every((id) => id in tree.nodes)) && tree.children.every((id) => id in tree.nodes);
  if (before && before.updated > entry.updated) await writeConversation({ ...before, tree: merge(tree, before.tree) });
  else if (before || whole) await writeConversation(kept);
}

export async function writeEntry(entry: Entry): Promise<void> {
  const { id, title, pinned, created, updated } = entry;
  await (await open()).put("entries", { id, title, pinned, created, updated });
}

export async function deleteConversation(id: string): Promise<void> {
  const transaction = (await open()).transaction(["entries", "contents"], "readwrite");
  await Promise.all([transaction.objectStore("entries").delete(id), transaction.objectStore("contents").delete(id), transaction.done]);
}

export async function deleteAll(): Promise<void> {
  const transaction = (await open()).transaction(["entries", "contents"], "readwrite");
  await Promise.all([transaction.objectStore("entries").clear(), transaction.objectStore("contents").clear(), transaction.done]);
}

/** The ids of the conversations in which something said contains `words`, whatever their case. */
export async function searchContents(words: string): Promise<Set<string>> {
  const wanted = words.toLocaleLowerCase();
  const found = new Set<string>();
  let cursor = await (await open()).transaction("contents").store.openCursor();
  while (cursor) {
    const { tree, id } = cursor.value;
    if (Object.values(tree.nodes).some(({ message }) => textOf(message).toLocaleLowerCase().includes(wanted))) found.add(id);
    cursor = await cursor.continue();
  }
  return found;
}

export async function readAll(): Promise<Conversation[]> {
  const entries = await listEntries();
  const conversations = await Promise.all(entries.map(({ id }) => readConversation(id)));
  return conversations.filter((conversation) => conversation !== null);
}

/** The same, but answers under way have stopped. */
export function settled(tree: Tree): Tree {
  const nodes = Object.entries(tree.nodes).map(([id, node]) => {
    const { message } = node;
    const running = message.role === "assistant" && message.state === "running";
    return [id, running ? { ...node, message: ended(message, "stopped", message.created) } : node] as const;
  });
  return { ...EMPTY, ...tree, nodes: Object.fromEntries(nodes) };
}
