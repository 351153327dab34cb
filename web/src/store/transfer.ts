/** Conversations as a JSON file, and back. */

import { DEFAULTS } from "../settings/fields";
import type { Conversation } from "./database";
import { fromChatGPT, isChatGPT } from "./imports/chatgpt";
import { fromOpenWebUI, isOpenWebUI } from "./imports/openwebui";
import type { Picture } from "./messages";
import { EMPTY, path, type Tree } from "./tree";

const FORMAT = "jaxllm-conversations";
const VERSION = 1;

export function exportText(conversations: Conversation[]): string {
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 1);
}

/** The conversations of an exported file, under new ids. Throws an Error that says what is wrong with it. */
export function importText(text: string, newId: () => string): Conversation[] {
  const file: unknown = JSON.parse(text);
  if (Array.isArray(file) && file.length === 0) throw new Error("the list is empty");
  return Array.isArray(file) ? file.map((item, at) => foreign(item, at, newId)) : ownConversations(file, newId);
}

function ownConversations(given: unknown, newId: () => string): Conversation[] {
  const file = (given ?? {}) as { format?: unknown; version?: unknown; conversations?: unknown };
  if (file.format !== FORMAT) throw new Error(`it is an export of neither this page, ChatGPT nor Open WebUI: format is ${JSON.stringify(file.format)}, not "${FORMAT}"`);
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

/** A conversation of ChatGPT's or Open WebUI's list. */
function foreign(item: unknown, at: number, newId: () => string): Conversation {
  try {
    if (isChatGPT(item)) return fromChatGPT(item, newId);
    if (isOpenWebUI(item)) return fromOpenWebUI(item, newId);
  } catch (error) {
    throw new Error(`item ${at} cannot be read: ${error instanceof Error ? error.message : String(error)}`);
  }
  throw new Error(`item ${at} of the list is a conversation of neither ChatGPT (with "mapping") nor Open WebUI (with "chat.history")`);
}

function arePictures(given: unknown): boolean {
  const isPicture = ({ name, url }: Partial<Picture>) => typeof name === "string" && typeof url === "string" && url.startsWith("data:image/");
  return given === undefined || (Array.isArray(given) && given.every((one: Partial<Picture> | null) => one !== null && isPicture(one)));
}

/** Whether every message is where its parent says it is, and is one. */
function isTree(tree: Tree | undefined): boolean {
  if (!tree || !Array.isArray(tree.children) || typeof tree.nodes !== "object") return false;
  const reached = new Set<string>();
  const queue = [...tree.children];
  for (let id = queue.pop(); id !== undefined; id = queue.pop()) {
    const node = tree.nodes[id];
    const { message } = node ?? {};
    const isMessage = message?.role === "user" ? typeof message.text === "string" && Array.isArray(message.files) && arePictures(message.pictures) : Array.isArray(message?.parts);
    if (!node || !isMessage || !Array.isArray(node.children) || reached.has(id)) return false;
    reached.add(id);
    queue.push(...node.children);
  }
  return reached.size === Object.keys(tree.nodes).length && path(tree).length <= reached.size;
}
