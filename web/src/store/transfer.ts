/** Conversations as a JSON file, and back. */

import { DEFAULTS } from "../settings/fields";
import type { Conversation } from "./database";
import { EMPTY, path, type Tree } from "./tree";

const FORMAT = "jaxllm-conversations";
const VERSION = 1;

export function exportText(conversations: Conversation[]): string {
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 1);
}

/** The conversations of an exported file, under new ids. Throws an Error that says what is wrong with it. */
export function importText(text: string, newId: () => string): Conversation[] {
  const file = JSON.parse(text) as { format?: unknown; version?: unknown; conversations?: unknown };
  if (file.format !== FORMAT) throw new Error(`format is ${JSON.stringify(file.format)}, not "${FORMAT}"`);
  if (file.version !== VERSION) throw new Error(`version is ${JSON.stringify(file.version)}; this page reads version ${VERSION}`);
  if (!Array.isArray(file.conversations)) throw new Error("conversations is not a list");
  return (file.conversations as Conversation[]).map((conversation, at) => {
    if (typeof conversation.title !== "string" || !isTree(conversation.tree)) throw new Error(`conversations[${at}] is not a conversation`);
    const now = Date.now();
    return {
      id: newId(),
      title: conversation.title,
      pinned: conversation.pinned === true,
      created: Number(conversation.created) || now,
      updated: Number(conversation.updated) || now,
      settings: { ...DEFAULTS, ...conversation.settings },
      tree: { ...EMPTY, ...conversation.tree },
    };
  });
}

/** Whether every message is where its parent says it is, and is one. */
function isTree(tree: Tree | undefined): boolean {
  if (!tree || !Array.isArray(tree.children) || typeof tree.nodes !== "object") return false;
  const reached = new Set<string>();
  const queue = [...tree.children];
  for (let id = queue.pop(); id !== undefined; id = queue.pop()) {
    const node = tree.nodes[id];
    const { message } = node ?? {};
    const isMessage = message?.role === "user" ? typeof message.text === "string" && Array.isArray(message.files) : Array.isArray(message?.parts);
    if (!node || !isMessage || !Array.isArray(node.children) || reached.has(id)) return false;
    reached.add(id);
    queue.push(...node.children);
  }
  return reached.size === Object.keys(tree.nodes).length && path(tree).length <= reached.size;
}
