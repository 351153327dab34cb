/** /v1/responses: the server runs the tools of its MCP servers, and asks for approval. Nothing is stored there. */

import { requestFields, structureFields, type Approval, type Settings } from "../settings/fields";
import type { AssistantMessage, Message, Part, StreamEvent, UserMessage } from "../store/messages";
import { urlsOf, withFiles } from "./files";
import { APIError, postJSON } from "./http";
import { tokens, type WireToken } from "./logprobs";
import { readEvents } from "./sse";

type Item = Record<string, unknown>;

const APPROVALS: Record<Approval, unknown> = { always: "always", never: "never", writes: { never: { read_only: true } } };

interface WireItem {
  type: string;
  id: string;
  server_label?: string;
  name?: string;
  arguments?: string;
  output?: string | null;
  error?: unknown;
  approval_request_id?: string | null;
}

interface WireUsage {
  input_tokens: number;
  output_tokens: number;
  input_tokens_details?: { cached_tokens: number };
  output_tokens_details?: { reasoning_tokens: number };
}

/** The part of OpenAI's events that this page reads. */
export interface WireEvent {
  type: string;
  item_id?: string;
  item?: WireItem;
  delta?: string;
  arguments?: string;
  logprobs?: WireToken[];
  message?: string;
  response?: {
    status: string;
    usage?: WireUsage | null;
    error?: { message: string } | null;
    incomplete_details?: { reason: string } | null;
  };
}

/** Ask for the next answer, or, if the last message is one with answered approvals, for the rest of it. */
export async function* streamResponse(settings: Settings, history: Message[], signal: AbortSignal): AsyncGenerator<StreamEvent> {
  const response = await postJSON("v1/responses", responseRequest(settings, history), signal);
  for await (const { data } of readEvents(response.body!)) {
    const event = JSON.parse(data) as WireEvent;
    yield* responseEvents(event);
    if (event.response && event.type !== "response.created" && event.type !== "response.in_progress" && event.type !== "response.queued") return;
  }
  throw new APIError(0, "the stream ended before the answer was complete");
}

export function responseRequest(settings: Settings, history: Message[]): Record<string, unknown> {
  return {
    ...requestFields(settings, "responses"),
    ...structureFields(settings, "responses"),
    ...(settings.system ? { instructions: settings.system } : {}),
    ...(settings.logprobs === null ? {} : { include: ["message.output_text.logprobs"], top_logprobs: settings.logprobs }),
    tools: Object.entries(settings.servers).map(([label, approval]) => ({
      type: "mcp", server_label: label, require_approval: APPROVALS[approval],
    })),
    ...(history.at(-1)?.role === "user" ? choiceFields(settings) : {}), // who has answered approvals wants no further call
    input: history.flatMap((message) => (message.role === "user" ? [{ role: "user", content: userContent(message) }] : answerItems(message))),
    store: false,
    stream: true,
  };
}

function userContent(message: UserMessage): string | Item[] {
  const [urls, text] = [urlsOf(message), withFiles(message)];
  if (!urls.length) return text;
  return [...urls.map((image_url) => ({ type: "input_image", image_url })), ...(text ? [{ type: "input_text", text }] : [])];
}

function choiceFields({ toolChoice }: Settings): Record<string, unknown> {
  if (toolChoice === "auto") return {};
  return { tool_choice: toolChoice === "required" ? toolChoice : { type: "mcp", server_label: toolChoice.server, name: toolChoice.name } };
}

function answerItems(answer: AssistantMessage): Item[] {
  const decided: Item[] = [];
  const items = answer.parts.flatMap((part): Item[] => {
    if (part.kind === "call" && part.approval !== null && part.state !== "asking" && part.state !== "stopped") {
      decided.push({ type: "mcp_approval_response", approval_request_id: part.approval, approve: part.state !== "denied" });
    }
    return partItems(part);
  });
  // The answers come behind all requests of one turn: in front of what followed them.
  const lastRequest = items.findLastIndex((item) => item.type === "mcp_approval_request");
  return lastRequest < 0 ? items : [...items.slice(0, lastRequest + 1), ...decided, ...items.slice(lastRequest + 1)];
}

function partItems(part: Part): Item[] {
  switch (part.kind) {
    case "text":
      return part.text.trim() ? [{ type: "message", role: "assistant", content: [{ type: "output_text", text: part.text }] }] : [];
    case "reasoning":
      return [{ type: "reasoning", summary: [], content: [{ type: "reasoning_text", text: part.text }] }];
    case "tools":
      return part.error === null ? [part.item] : [];
    case "call": {
      const { server: server_label, name, arguments: args, output, error, approval } = part;
      const request = approval === null ? [] : [{ type: "mcp_approval_request", id: approval, server_label, name, arguments: args }];
      const call = { type: "mcp_call", id: part.id, server_label, name, arguments: args, output, error, approval_request_id: approval };
      return part.state === "done" || part.state === "failed" ? [...request, call] : request;
    }
  }
}

export function* responseEvents(event: WireEvent): Generator<StreamEvent> {
  const { item, response } = event;
  switch (event.type) {
    case "response.output_text.delta":
      yield { type: "text", text: event.delta ?? "", tokens: tokens(event.logprobs) };
      break;
    case "response.reasoning_text.delta":
    case "response.reasoning_summary_text.delta":
      yield { type: "reasoning", text: event.delta ?? "" };
      break;
    case "response.mcp_call_arguments.delta":
      yield { type: "arguments", id: event.item_id!, text: event.delta ?? "" };
      break;
    case "response.mcp_call_arguments.done":
      yield { type: "ready", id: event.item_id!, arguments: event.arguments ?? "" };
      break;
    case "response.output_item.added":
      if (item?.type === "mcp_call") yield call(item, false);
      break;
    case "response.output_item.done":
      if (item) yield* finishedItem(item);
      break;
    case "error":
      throw new APIError(500, event.message ?? "the server failed");
    case "response.failed":
      throw new APIError(500, response?.error?.message ?? "the server failed");
    case "response.completed":
    case "response.incomplete": {
      const usage = response?.usage;
      if (usage) {
        const cached = usage.input_tokens_details?.cached_tokens ?? 0;
        const reasoning = usage.output_tokens_details?.reasoning_tokens ?? 0;
        yield { type: "usage", prompt: usage.input_tokens, cached, completion: usage.output_tokens, reasoning };
      }
      const cut = response?.incomplete_details?.reason === "max_output_tokens";
      yield { type: "finish", reason: cut ? "length" : "stop" };
    }
  }
}

function* finishedItem(item: WireItem): Generator<StreamEvent> {
  if (item.type === "mcp_approval_request") yield call(item, true);
  if (item.type === "mcp_list_tools") {
    yield { type: "tools", server: item.server_label!, error: (item.error as string | null) ?? null, item: { ...item } };
  }
  if (item.type === "mcp_call") {
    yield { type: "ready", id: item.id, arguments: item.arguments ?? "" };
    yield { type: "result", id: item.id, output: item.output ?? null, error: item.error ?? null };
  }
}

function call(item: WireItem, asking: boolean): StreamEvent {
  const approval = asking ? item.id : (item.approval_request_id ?? null);
  return { type: "call", id: item.id, server: item.server_label ?? "", name: item.name ?? "", arguments: item.arguments ?? "", asking, approval };
}
