/** An export of Open WebUI, of all chats or of one: a list, whose messages are a tree named `history`. */

import { DEFAULTS } from "../../settings/fields";
import type { Conversation } from "../database";
import type { Message, Part, TextFile } from "../messages";
import { answerOf, conversationOf, question, textPart, thought, treeOf } from "./foreign";

interface WebUIMessage {
  id: string;
  parentId?: string | null;
  role: string;
  content?: unknown;
  timestamp?: number;
  model?: string;
  files?: { name?: string; file?: { filename?: string; data?: { content?: unknown } } }[];
}

export interface OpenWebUIChat {
  title?: string;
  created_at?: number;
  updated_at?: number;
  pinned?: boolean | null;
  chat: {
    title?: string;
    system?: string;
    params?: { system?: string };
    history: { messages: Record<string, WebUIMessage>; currentId?: string | null };
  };
}

export function isOpenWebUI(item: unknown): item is OpenWebUIChat {
  const messages: unknown = (item as Partial<OpenWebUIChat> | null)?.chat?.history?.messages;
  return typeof messages === "object" && messages !== null;
}

export function fromOpenWebUI(given: OpenWebUIChat, newId: () => string): Conversation {
  const { history, params, system, title } = given.chat;
  const messages = Object.entries(history.messages).map(([id, message]) => ({ id, parent: message.parentId ?? null, message: messageOf(message) }));
  const tree = treeOf(messages, history.currentId ?? null, newId);
  const own = { pinned: given.pinned === true, settings: { ...DEFAULTS, system: params?.system ?? system ?? "" } };
  return conversationOf(given.title ?? title, tree, { created: given.created_at, updated: given.updated_at }, newId, own);
}

function messageOf({ role, content, timestamp, model, files }: WebUIMessage): Message | null {
  const text = typeof content === "string" ? content : "";
  if (role === "user") return { ...question(text, timestamp), files: (files ?? []).flatMap(textFile) } as Message;
  return role === "assistant" && text ? answerOf(partsOf(text), model, timestamp) : null;
}

const REASONING = /<details type="reasoning"([^>]*)>\s*<summary>[^<]*<\/summary>(.*?)<\/details>/gs;
const ESCAPED: Record<string, string> = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#x27;": "'" };

/** An answer's text, with thoughts as an HTML element in it, whose lines are quoted and escaped. */
function partsOf(content: string): Part[] {
  const parts: Part[] = [];
  let end = 0;
  const say = (text: string) => text.trim() && parts.push(textPart(text.trim()));
  for (const found of content.matchAll(REASONING)) {
    const [whole, attributes, inner] = found as unknown as [string, string, string];
    say(content.slice(end, found.index));
    const text = inner.replace(/&(amp|lt|gt|quot|#x27);/g, (entity) => ESCAPED[entity]!);
    parts.push(thought(text.trim().replace(/^> ?/gm, ""), Number(/duration="(\d+)"/.exec(attributes)?.[1] ?? 0)));
    end = found.index + whole.length;
  }
  say(content.slice(end));
  return parts;
}

/** The text that Open WebUI has read from a file, if the export has it. */
function textFile({ name, file }: NonNullable<WebUIMessage["files"]>[number]): TextFile[] {
  const text = file?.data?.content;
  return typeof text === "string" ? [{ name: name ?? file?.filename ?? "", text }] : [];
}
