/** The ways out of a conversation that the model's context no longer holds. */

import { chatMessages } from "../api/chat";
import { countTokens } from "../api/server";
import { askSummary } from "../api/summary";
import { translate } from "../i18n";
import { contextOf, useServer } from "../serverState";
import { DEFAULTS } from "../settings/fields";
import { branchTitle, changeMessage, createConversation, useConversations } from "../store/conversations";
import type { Conversation } from "../store/database";
import { changeDraft } from "../store/drafts";
import { usePreferences } from "../store/preferences";
import { markdownOf } from "../store/markdown";
import { lineage, linear, read, type TreeNode } from "../store/tree";

/** A picture takes about as many tokens as a text of this length. */
const PICTURE_CHARACTERS = 4000;

/** The message that the model reads first once the oldest turns, half of what it reads now, are left out; null: there is but one turn. */
export function nextFrom(nodes: TreeNode[]): { at: string; from: string } | null {
  const sized = (key: string, value: unknown) => (key === "url" ? "x".repeat(PICTURE_CHARACTERS) : value);
  const sizes = nodes.map(({ message }) => JSON.stringify(chatMessages(DEFAULTS, [message]), sized).length);
  const begins = nodes.map(({ message }, index) => (message.role === "user" ? index : -1)).filter((index) => index > 0);
  const rest = (index: number) => sizes.slice(index).reduce((sum, size) => sum + size, 0);
  const first = begins.find((index) => rest(index) <= rest(0) / 2) ?? begins.at(-1);
  return first === undefined ? null : { at: nodes[begins.at(-1)!]!.id, from: nodes[first]!.id };
}

/** Have the model read only the newer half of what comes before this answer, and itself. */
export function leaveOut(id: string, messageId: string): void {
  const next = nextFrom(read(lineage(conversation(id).tree, messageId)));
  if (next) changeMessage(id, next.at, (message) => (message.role === "user" ? { ...message, from: next.from } : message));
}

/** Have the model read all again. */
export function putBack(id: string, messageId: string): void {
  for (const { id: at, message } of lineage(conversation(id).tree, messageId)) {
    if (message.role !== "user" || message.from === undefined) continue;
    const { from: _, ...whole } = message;
    changeMessage(id, at, () => whole);
  }
}

/** A new conversation, whose draft has a summary of what came before this answer, and the question that it did not answer. Returns its id. Throws APIError. */
export async function continueElsewhere(id: string, messageId: string): Promise<string> {
  const old = conversation(id);
  const nodes = lineage(old.tree, messageId);
  const { message } = nodes.at(-1)!;
  const begun = message.role === "assistant" && message.parts.length > 0;
  const question = nodes.at(-2)?.message;
  const unanswered = !begun && question?.role === "user" ? question : { text: "", files: [], pictures: [] };
  const t = translate(usePreferences.getState().language);
  const names = { you: t("you"), assistant: t("assistant"), untitled: t("untitled") };
  const said = markdownOf({ ...old, tree: linear(begun ? nodes : nodes.slice(0, -2)) }, names, "named");
  const summary = await summaryOf(said, old);
  const titles = (useConversations.getState().entries ?? []).map(({ title }) => title);
  const fresh = createConversation(old.settings, branchTitle(old.title, titles));
  changeDraft(fresh.id, () => ({ text: unanswered.text, files: [{ name: t("summaryFile"), text: summary }, ...unanswered.files], pictures: unanswered.pictures ?? [] }));
  return fresh.id;
}

/** Of a text that is longer than the context: part after part, each with the summary of those before it. */
async function summaryOf(text: string, { settings }: Conversation): Promise<string> {
  const tokens = await countTokens(text, settings.model, new AbortController().signal);
  const context = contextOf(useServer.getState().models, settings.model) ?? 2 * tokens;
  const parts = partsOf(text, Math.ceil((2 * tokens) / context));
  let summary = "";
  for (const part of parts) summary = await askSummary(settings, summary, part, Math.floor(context / 8));
  return summary;
}

/** The text in so many parts, which are about as long as each other and end with a line where they can. */
export function partsOf(text: string, count: number): string[] {
  const length = Math.ceil(text.length / Math.max(count, 1));
  const parts: string[] = [];
  for (let at = 0; at < text.length; ) {
    const line = at + length < text.length ? text.lastIndexOf("\n", at + length) + 1 : 0;
    const within = at + length;
    const whole = /[\ud800-\udbff]/.test(text.charAt(within - 1)) ? within + 1 : within;
    const end = line > at + length / 2 ? line : whole;
    parts.push(text.slice(at, end));
    at = end;
  }
  return parts;
}

function conversation(id: string): Conversation {
  const found = useConversations.getState().loaded[id];
  if (!found) throw new Error(`conversation ${id} is not loaded`);
  return found;
}
