/** A conversation, as it is shown, as Markdown: to be read elsewhere, not to be imported again. */

import { fenced, withFiles } from "../api/files";
import type { Conversation } from "./database";
import type { CallPart, Message, Part, Picture } from "./messages";
import { path } from "./tree";

/** What the file calls who speaks, and a conversation without a title. */
export interface Names {
  you: string;
  assistant: string;
  untitled: string;
}

/** Pictures are in it as data: URLs, or only by their names. */
export function markdownOf(conversation: Conversation, names: Names, pictures: "inside" | "named"): string {
  const turns = path(conversation.tree).map(({ message }) => `## ${message.role === "user" ? names.you : names.assistant}\n\n${said(message, pictures)}`);
  return [`# ${conversation.title || names.untitled}`, ...turns].join("\n\n") + "\n";
}

function said(message: Message, pictures: "inside" | "named"): string {
  if (message.role === "user") return [...(message.pictures ?? []).map((picture) => pictureText(picture, pictures)), withFiles(message)].filter(Boolean).join("\n\n");
  return message.parts.map(partText).filter(Boolean).join("\n\n");
}

function pictureText({ name, url }: Picture, pictures: "inside" | "named"): string {
  const text = `[${name.replace(/[[\]\\]/g, "\\$&")}]`;
  return pictures === "inside" ? `!${text}(${url})` : text;
}

function partText(part: Part): string {
  switch (part.kind) {
    case "text":
      return part.text.trim();
    case "reasoning":
      return part.text.trim().split("\n").map((line) => `> ${line}`.trimEnd()).join("\n");
    case "call":
      return callText(part);
    case "tools":
      return "";
  }
}

/** As a call in a program, with its result behind it. */
function callText({ server, name, arguments: given, output }: CallPart): string {
  return fenced([`${server}: ${name}(${given})`, ...(output === null ? [] : [output])].join("\n"));
}
