/** conversations.json of a ChatGPT export: a list of conversations, whose messages are a tree named `mapping`. */

import type { Conversation } from "../database";
import type { Message } from "../messages";
import { answerOf, conversationOf, question, textPart, thought, treeOf } from "./foreign";

interface Content {
  content_type: string;
  parts?: unknown[];
  thoughts?: { summary?: string; content?: string }[];
}

interface Node {
  id: string;
  parent?: string | null;
  message?: {
    author: { role: string };
    create_time?: number | null;
    content?: Content;
    recipient?: string;
    metadata?: { model_slug?: string; is_visually_hidden_from_conversation?: boolean };
  } | null;
}

export interface ChatGPTConversation {
  title?: string | null;
  create_time?: number;
  update_time?: number;
  current_node?: string | null;
  mapping: Record<string, Node>;
}

export function isChatGPT(item: unknown): item is ChatGPTConversation {
  const { mapping } = (item ?? {}) as Partial<ChatGPTConversation>;
  return typeof mapping === "object" && mapping !== null;
}

export function fromChatGPT(given: ChatGPTConversation, newId: () => string): Conversation {
  const messages = Object.entries(given.mapping).map(([id, node]) => ({ id, parent: node.parent ?? null, message: messageOf(node) }));
  return conversationOf(given.title, treeOf(messages, given.current_node ?? null, newId), { created: given.create_time, updated: given.update_time }, newId);
}

/** Null for what ChatGPT itself does not show: system messages, calls of its tools and their results. */
function messageOf({ message }: Node): Message | null {
  if (!message?.content || message.metadata?.is_visually_hidden_from_conversation) return null;
  const { author, content, create_time } = message;
  if (author.role === "user") {
    const text = textIn(content);
    return text ? question(text, create_time) : null;
  }
  if (author.role !== "assistant" || (message.recipient ?? "all") !== "all") return null;
  const text = textIn(content);
  const thoughts = (content.thoughts ?? []).map(({ summary, content: more }) => [summary, more].filter(Boolean).join("\n\n")).filter(Boolean);
  const parts = [...thoughts.map((one) => thought(one)), ...(text ? [textPart(text)] : [])];
  return parts.length ? answerOf(parts, message.metadata?.model_slug, create_time) : null;
}

/** The text; in the place of a picture or a recording stands what it was. */
function textIn({ content_type, parts }: Content): string {
  if (content_type !== "text" && content_type !== "multimodal_text") return "";
  const texts = (parts ?? []).map((part) => (typeof part === "string" ? part : `[${(part as { content_type?: string } | null)?.content_type ?? "?"}]`));
  return texts.filter((text) => text.trim()).join("\n\n");
}
