/** Titles of conversations: the first words of the first message, or what the model makes of them. */

import { APIError } from "../api/http";
import { askTitle } from "../api/titles";
import { isBase, useServer } from "../serverState";
import { change, titleOf, useConversations } from "../store/conversations";
import type { Conversation } from "../store/database";
import type { UserMessage } from "../store/messages";
import { usePreferences } from "../store/preferences";
import { path } from "../store/tree";

export function firstWords(message: UserMessage): string {
  return titleOf(message.text || message.files[0]?.name || message.pictures?.[0]?.name || "");
}

/** Have the model name a conversation after its first answer, if the person wants that. Its first words stay where the model gives no title. */
export async function nameAfterAnswer(id: string): Promise<void> {
  const conversation = useConversations.getState().loaded[id];
  if (!conversation || usePreferences.getState().titles !== "model" || !hasFirstWords(conversation)) return;
  const history = path(conversation.tree).map(({ message }) => message);
  if (history.length !== 2 || isBase(useServer.getState().models, conversation.settings.model)) return;
  try {
    const title = await askTitle(conversation.settings, history);
    change(id, (now) => (hasFirstWords(now) ? { ...now, title } : now));
  } catch (error) {
    if (!(error instanceof APIError)) throw error;
  }
}

/** Whether nobody has given it another title. */
function hasFirstWords({ title, tree }: Conversation): boolean {
  const first = path(tree)[0]?.message;
  return first?.role === "user" && title === firstWords(first);
}
