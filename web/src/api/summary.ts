import type { Settings } from "../settings/fields";
import { fenced } from "./files";
import { APIError, postJSON } from "./http";

const ASK = "Summarize this conversation for somebody who continues it: what was asked, found and decided, with names, numbers and code that are still needed. Write in the language that it is in, and only the summary.";
const AS_BEFORE = "A summary of what came before:";

interface Completion {
  choices: { message: { content: string | null } }[];
}

/** What the model makes of one part of a conversation and the summary of the parts before it. Throws APIError where it says nothing. */
export async function askSummary(settings: Settings, before: string, part: string, maxTokens: number): Promise<string> {
  const response = await postJSON("v1/chat/completions", summaryRequest(settings, before, part, maxTokens));
  const { choices } = (await response.json()) as Completion;
  const summary = choices[0]?.message.content?.trim();
  if (!summary) throw new APIError(500, "the model gave no summary");
  return summary;
}

export function summaryRequest(settings: Settings, before: string, part: string, maxTokens: number): Record<string, unknown> {
  const content = [...(before ? [AS_BEFORE, before] : []), fenced(part), ASK].join("\n\n");
  return {
    ...(settings.model === null ? {} : { model: settings.model }),
    messages: [{ role: "user", content }],
    reasoning_effort: "none",
    max_completion_tokens: maxTokens,
    temperature: 0,
    tools: [],
  };
}
