import type { Settings } from "../settings/fields";
import type { Message } from "../store/messages";
import { chatMessages } from "./chat";
import { APIError, postJSON } from "./http";

const ASK = "Give the conversation so far a title of at most six words, in the language that it is in.";
const LONGEST = 60;
const MAX_TOKENS = 80;

const SCHEMA = {
  type: "object", properties: { title: { type: "string", minLength: 1, maxLength: LONGEST } }, required: ["title"], additionalProperties: false,
};

interface Completion {
  choices: { message: { content: string | null } }[];
}

/** The title that the model gives to what was said. Throws APIError where it gives none. */
export async function askTitle(settings: Settings, history: Message[]): Promise<string> {
  const response = await postJSON("v1/chat/completions", titleRequest(settings, history));
  const { choices } = (await response.json()) as Completion;
  const title = titleIn(choices[0]?.message.content ?? "");
  if (title === null) throw new APIError(500, "the model gave no title");
  return title;
}

export function titleRequest(settings: Settings, history: Message[]): Record<string, unknown> {
  return {
    ...(settings.model === null ? {} : { model: settings.model }),
    messages: [...chatMessages(settings, history), { role: "user", content: ASK }],
    response_format: { type: "json_schema", json_schema: { name: "title", schema: SCHEMA } },
    reasoning_effort: "none",
    max_completion_tokens: MAX_TOKENS,
    temperature: 0,
    tools: [],
  };
}

/** Null: the answer was cut off, or is blank. */
function titleIn(text: string): string | null {
  try {
    return (JSON.parse(text) as { title: string }).title.trim() || null;
  } catch (error) {
    if (error instanceof SyntaxError) return null;
    throw error;
  }
}
