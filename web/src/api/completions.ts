/** /v1/completions: how a base model goes on with a text. Who said what is nothing to it, and pictures it is not shown. */

import { requestFields, structureFields, type Settings } from "../settings/fields";
import { textOf, type Message, type StreamEvent, type Token } from "../store/messages";
import { withFiles } from "./files";
import { APIError, postJSON } from "./http";
import { readEvents } from "./sse";

/** Base models seldom come to an end; the text can be continued. */
const MAX_TOKENS = 256;

interface Logprobs {
  tokens: string[];
  token_logprobs: number[];
  top_logprobs: Record<string, number>[];
}

interface Chunk {
  choices: { text: string; logprobs?: Logprobs | null; finish_reason?: string | null }[];
  usage?: { prompt_tokens: number; completion_tokens: number; prompt_tokens_details?: { cached_tokens: number } } | null;
  timings?: { predicted_n: number; predicted_per_second: number | null };
  error?: { message: string };
}

/** Ask for more of the text that has been written and generated so far. */
export async function* streamCompletion(settings: Settings, history: Message[], signal: AbortSignal): AsyncGenerator<StreamEvent> {
  const response = await postJSON("v1/completions", completionRequest(settings, history), signal);
  for await (const { data } of readEvents(response.body!)) {
    if (data === "[DONE]") return;
    yield* completionEvents(JSON.parse(data) as Chunk);
  }
  throw new APIError(0, "the stream ended before the answer was complete");
}

export function completionRequest(settings: Settings, history: Message[]): Record<string, unknown> {
  const { max_completion_tokens = MAX_TOKENS, ...fields } = requestFields(settings, "completion");
  return {
    truncate_prompt_tokens: -1, // of a text that is longer than the context the end is what is continued
    ...fields,
    ...structureFields(settings, "chat"),
    ...(settings.logprobs === null ? {} : { logprobs: settings.logprobs }),
    max_tokens: max_completion_tokens,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true }, // an answer that is stopped has no last chunk
    timings_per_token: true,
    prompt: history.map((message) => (message.role === "user" ? withFiles(message) : textOf(message))).join(""),
  };
}

export function* completionEvents(chunk: Chunk): Generator<StreamEvent> {
  if (chunk.error) throw new APIError(500, chunk.error.message);
  const choice = chunk.choices[0];
  if (choice) {
    if (choice.text) yield { type: "text", text: choice.text, tokens: tokens(choice.logprobs) };
    if (choice.finish_reason) yield { type: "finish", reason: choice.finish_reason };
  }
  if (chunk.timings) yield { type: "speed", completion: chunk.timings.predicted_n, tokensPerSecond: chunk.timings.predicted_per_second };
  if (chunk.usage) {
    const { prompt_tokens, completion_tokens, prompt_tokens_details } = chunk.usage;
    yield { type: "usage", prompt: prompt_tokens, cached: prompt_tokens_details?.cached_tokens ?? 0, completion: completion_tokens, reasoning: 0 };
  }
}

function tokens(wire: Logprobs | null | undefined): Token[] {
  return (wire?.tokens ?? []).map((text, at) => ({
    text: shown(text),
    logprob: wire!.token_logprobs[at]!,
    top: Object.entries(wire!.top_logprobs[at] ?? {}).map(([other, logprob]) => ({ text: shown(other), logprob })).sort((a, b) => b.logprob - a.logprob),
  }));
}

/** A part of a character is named bytes:\xe2 here. */
function shown(token: string): string {
  return token.replace(/^bytes:(?=.*\\x)/s, "");
}
