import type { UserMessage } from "../store/messages";
import { request } from "./http";

/** A PDF's text, which the server reads. Throws APIError, of status 400 with what is said of the file after its name. */
export async function textOfFile(file: File): Promise<string> {
  const form = new FormData();
  form.append("file", file);
  return (await request("v1/files/text", { method: "POST", body: form })).text();
}

/** The data: URLs of a message's pictures. */
export function urlsOf(message: UserMessage): string[] {
  return (message.pictures ?? []).map(({ url }) => url);
}

/** A text between fences that are longer than any in it. */
export function fenced(text: string): string {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text}\n${fence}`;
}

/** What the model reads of a message, beside its pictures: its files first, each in fences. */
export function withFiles(message: UserMessage): string {
  const files = message.files.map(({ name, text }) => `${name}:\n${fenced(text)}`);
  return [...files, message.text].filter(Boolean).join("\n\n");
}
