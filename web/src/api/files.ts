import type { UserMessage } from "../store/messages";

/** What the model reads of a message: its files first, each in a fence that is longer than any in it. */
export function withFiles(message: UserMessage): string {
  const files = message.files.map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text}\n${fence}`;
  });
  return [...files, message.text].filter(Boolean).join("\n\n");
}
