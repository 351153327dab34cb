/** /v1/chat/completions: it takes every sampling field, and continues an answer; it runs no tools. */

import { requestFields, structureFields, type Settings } from "../settings/fields";
import type { AssistantMessage, Message, StreamEvent, UserMessage } from "../store/messages";
import { urlsOf, withFiles } from "./files";
import { APIError, postJSON } from "./http";
import { tokens, type WireToken } from "./logprobs";
import { readEvents } from "./sse";

type ContentPart = { type: "image_url"; image_url: { url: string } } | { type: "text"; text: string };

export interface ChatMessage {
  role: "system" | "user" | "assistant" | "tool";
  content?: string | ContentPart[];
  reasoning_content?: string;
  tool_calls?: { id: string; type: "function"; function: { name: string; arguments: string } }[];
  tool_call_id?: string;
}

interface Chunk {
  choices: {
    delta: { content?: string | null; reasoning_content?: string };
    logprobs?: { content: WireToken[] | null } | null;
    finish_reason?: string | null;
  }[];
  usage?: {
    prompt_tokens: number;
    completion_tokens: number;
    prompt_tokens_details?: { cached_tokens: number };
    completion_tokens_details?: { reasoning_tokens: number };
  } | null;
  timings?: { predicted_n: number; predicted_per_second: number | null };
  error?: { message: string };
}

/** Ask for the next answer, or, if the last message is one, for the rest of it. */
export async function* streamChat(settings: Settings, history: Message[], signal: AbortSignal): AsyncGenerator<StreamEvent> {
  const response = await postJSON("v1/chat/completions", chatRequest(settings, history), signal);
  for await (const { data } of readEvents(response.body!)) {
    if (data === "[DONE]") return;
    yield* chatEvents(JSON.parse(data) as Chunk);
  }
  throw new APIError(0, "the stream ended before the answer was complete");
}

export function chatRequest(settings: Settings, history: Message[]): Record<string, unknown> {
  const continues = history.at(-1)?.role === "assistant";
  return {
    ...requestFields(settings, "chat"),
    ...structureFields(settings, "chat"),
    ...(settings.logprobs === null ? {} : { logprobs: true, top_logprobs: settings.logprobs }),
    ...(continues ? { continue_final_message: true } : {}),
    tools: [], // those of the server's own configuration stay out
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true }, // an answer that is stopped has no last chunk
    timings_per_token: true,
    messages: chatMessages(settings, history),
  };
}

export function chatMessages(settings: Settings, history: Message[]): ChatMessage[] {
  const system: ChatMessage[] = settings.system ? [{ role: "system", content: settings.system }] : [];
  return [...system, ...history.flatMap((message) => (message.role === "user" ? [{ role: "user" as const, content: userContent(message) }] : answerMessages(message)))];
}

function userContent(message: UserMessage): string | ContentPart[] {
  const [urls, text] = [urlsOf(message), withFiles(message)];
  if (!urls.length) return text;
  return [...urls.map((url) => ({ type: "image_url" as const, image_url: { url } })), ...(text ? [{ type: "text" as const, text }] : [])];
}

/** An answer with calls in it is several messages: text with the calls behind it, then their results, then further text. */
function answerMessages(answer: AssistantMessage): ChatMessage[] {
  const messages: ChatMessage[] = [];
  let open: ChatMessage | null = null;
  const begin = (): ChatMessage => {
    if (open === null || open.tool_calls) messages.push((open = { role: "assistant", content: "" }));
    return open;
  };
  const results: ChatMessage[] = [];
  const flush = () => {
    messages.push(...results.splice(0));
    open = null;
  };
  for (const part of answer.parts) {
    if (part.kind === "text" || part.kind === "reasoning") {
      if (results.length) flush();
      const message = begin();
      if (part.kind === "text") message.content = `${message.content as string}${part.text}`;
      else message.reasoning_content = (message.reasoning_content ?? "") + part.text;
    } else if (part.kind === "call" && part.output !== null) {
      const message: ChatMessage = open ?? begin();
      message.tool_calls = [...(message.tool_calls ?? []), { id: part.id, type: "function", function: { name: `${part.server}_${part.name}`, arguments: part.arguments || "{}" } }];
      results.push({ role: "tool", tool_call_id: part.id, content: part.output });
    }
  }
  if (results.length) flush();
  return messages;
}

export function* chatEvents(chunk: Chunk): Generator<StreamEvent> {
  if (chunk.error) throw new APIError(500, chunk.error.message);
  const choice = chunk.choices[0];
  if (choice) {
    const { content, reasoning_content } = choice.delta;
    if (reasoning_content) yield { type: "reasoning", text: reasoning_content };
    const said = tokens(choice.logprobs?.content);
    if (content || (said.length && !reasoning_content)) yield { type: "text", text: content ?? "", tokens: said };
    if (choice.finish_reason) yield { type: "finish", reason: choice.finish_reason };
  }
  if (chunk.timings) yield { type: "speed", completion: chunk.timings.predicted_n, tokensPerSecond: chunk.timings.predicted_per_second };
  if (chunk.usage) {
    const { usage } = chunk;
    yield {
      type: "usage",
      prompt: usage.prompt_tokens,
      cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
      completion: usage.completion_tokens,
      reasoning: usage.completion_tokens_details?.reasoning_tokens ?? 0,
    };
  }
}
