/** What is said in a conversation, and how an answer grows by the events of its stream. Pure data and functions. */

export interface TextFile {
  name: string;
  text: string;
}

export interface Picture {
  name: string;
  /** A data: URL. */
  url: string;
}

export interface UserMessage {
  role: "user";
  text: string;
  files: TextFile[];
  /** What a model that sees is shown before the text; left out: nothing. */
  pictures?: Picture[];
  created: number;
  /** The oldest message that the model reads from here on; left out: the first. */
  from?: string;
}

export interface Alternative {
  text: string;
  logprob: number;
}

/** A generated token and the likeliest ones at its place. */
export interface Token extends Alternative {
  top: Alternative[];
}

export interface TextPart {
  kind: "text";
  text: string;
  tokens: Token[];
}

export interface ReasoningPart {
  kind: "reasoning";
  text: string;
  started: number;
  /** Null while it goes on; 0: when is not known, in an imported conversation. */
  ended: number | null;
}

export type CallState = "writing" | "running" | "asking" | "approved" | "denied" | "done" | "failed" | "stopped";

export interface CallPart {
  kind: "call";
  id: string;
  /** The MCP server that runs it. */
  server: string;
  name: string;
  arguments: string;
  state: CallState;
  output: string | null;
  error: unknown;
  /** Of the request that the person here answered. */
  approval: string | null;
}

/** Tools that an MCP server listed: sent back, so that it need not list them again. */
export interface ToolsPart {
  kind: "tools";
  server: string;
  error: string | null;
  item: Record<string, unknown>;
}

export type Part = TextPart | ReasoningPart | CallPart | ToolsPart;

export interface Stats {
  promptTokens: number;
  cachedTokens: number;
  completionTokens: number;
  reasoningTokens: number;
  /** From sending to the first token. */
  firstTokenMs: number | null;
  tokensPerSecond: number | null;
}

/** asking: waits for approvals. cut: max_tokens or the context's end. stopped: by the person. */
export type AnswerState = "running" | "asking" | "done" | "cut" | "stopped" | "failed";

export interface AssistantMessage {
  role: "assistant";
  parts: Part[];
  model: string;
  created: number;
  state: AnswerState;
  /** What went wrong, or, while it runs, why nothing comes. */
  error: string | null;
  /** What went wrong is that the context does not hold the conversation. */
  full?: boolean;
  stats: Stats | null;
}

export type Message = UserMessage | AssistantMessage;

export type StreamEvent =
  | { type: "text"; text: string; tokens: Token[] }
  | { type: "reasoning"; text: string }
  | { type: "call"; id: string; server: string; name: string; arguments: string; asking: boolean; approval: string | null }
  | { type: "arguments"; id: string; text: string }
  | { type: "ready"; id: string; arguments: string }
  | { type: "result"; id: string; output: string | null; error: unknown }
  | { type: "tools"; server: string; error: string | null; item: Record<string, unknown> }
  | { type: "usage"; prompt: number; cached: number; completion: number; reasoning: number }
  | { type: "speed"; completion: number; tokensPerSecond: number | null }
  | { type: "finish"; reason: string };

export function newAnswer(model: string, now: number): AssistantMessage {
  return { role: "assistant", parts: [], model, created: now, state: "running", error: null, stats: null };
}

const NO_STATS: Stats = {
  promptTokens: 0, cachedTokens: 0, completionTokens: 0, reasoningTokens: 0, firstTokenMs: null, tokensPerSecond: null,
};

/** The tokens that a conversation takes of the context, by what the server has counted. */
export function contextUsed(messages: Message[]): number {
  let used = 0;
  for (const message of messages.toReversed()) {
    const stats = message.role === "assistant" ? message.stats : null;
    used += (stats?.promptTokens ?? 0) + (stats?.completionTokens ?? 0);
    if (stats?.promptTokens) break; // the prompt had all that came before
  }
  return used;
}

/** The answer after one event; `now` and `sent`, when its request was, are in milliseconds. */
export function grow(answer: AssistantMessage, event: StreamEvent, now: number, sent: number): AssistantMessage {
  const stats = answer.stats ?? NO_STATS;
  switch (event.type) {
    case "text":
    case "reasoning": {
      const firstTokenMs = stats.firstTokenMs ?? now - sent;
      return { ...answer, parts: addText(answer.parts, event, now), stats: { ...stats, firstTokenMs } };
    }
    case "call":
      return { ...answer, parts: addCall(closed(answer.parts, now), event) };
    case "arguments":
      return changeCall(answer, event.id, (call) => ({ ...call, arguments: call.arguments + event.text }));
    case "ready":
      return changeCall(answer, event.id, (call) => ({ ...call, arguments: event.arguments, state: call.state === "writing" ? "running" : call.state }));
    case "result":
      return changeCall(answer, event.id, (call) => ({
        ...call, output: event.output, error: event.error, state: event.error ? "failed" : "done",
      }));
    case "tools":
      return { ...answer, parts: [...answer.parts, { kind: "tools", server: event.server, error: event.error, item: event.item }] };
    case "usage": {
      const { prompt, cached, completion, reasoning } = event;
      return {
        ...answer,
        stats: { ...stats, promptTokens: prompt, cachedTokens: cached, completionTokens: completion, reasoningTokens: reasoning },
      };
    }
    case "speed":
      return { ...answer, stats: { ...stats, completionTokens: event.completion, tokensPerSecond: event.tokensPerSecond } };
    case "finish":
      return ended(answer, event.reason === "length" ? "cut" : "done", now);
  }
}

/** The answer when its stream is over, for whatever reason; calls that nobody has answered keep it open. */
export function ended(answer: AssistantMessage, state: AnswerState, now: number, error: string | null = null): AssistantMessage {
  const asking = state === "done" && pendingCalls(answer).length > 0;
  const parts = closed(answer.parts, now).map((part) =>
    part.kind === "call" && (part.state === "writing" || part.state === "running" || part.state === "approved")
      ? { ...part, state: "stopped" as const }
      : part,
  );
  return { ...answer, parts, state: asking ? "asking" : state, error };
}

/** The calls that wait for the person's approval. */
export function pendingCalls(answer: AssistantMessage): CallPart[] {
  return answer.parts.filter((part): part is CallPart => part.kind === "call" && part.state === "asking");
}

export function decide(answer: AssistantMessage, callId: string, approve: boolean): AssistantMessage {
  return changeCall(answer, callId, (call) => (call.state === "asking" ? { ...call, state: approve ? "approved" : "denied" } : call));
}

/** All that an answer says, without its reasoning and calls. */
export function textOf(message: Message): string {
  if (message.role === "user") return message.text;
  return message.parts.map((part) => (part.kind === "text" ? part.text : "")).filter(Boolean).join("\n\n");
}

/** Whether more text can be asked for behind what is there. */
export function canContinue(answer: AssistantMessage): boolean {
  const last = answer.parts.at(-1);
  return (answer.state === "cut" || answer.state === "stopped" || answer.state === "failed") && last?.kind === "text" && last.text !== "";
}

/** What of an answer is kept when its connection breaks and it is asked for again; null: it cannot be, since tools have run. */
export function resumable(answer: AssistantMessage): AssistantMessage | null {
  if (answer.parts.some((part) => part.kind === "call")) return null;
  const last = answer.parts.at(-1);
  return last?.kind === "text" && last.text !== "" ? answer : { ...answer, parts: [] };
}

function addText(parts: Part[], event: StreamEvent & { type: "text" | "reasoning" }, now: number): Part[] {
  const last = parts.at(-1);
  if (event.type === "reasoning") {
    if (last?.kind === "reasoning" && last.ended === null) return [...parts.slice(0, -1), { ...last, text: last.text + event.text }];
    return event.text.trim() ? [...parts, { kind: "reasoning", text: event.text, started: now, ended: null }] : parts;
  }
  if (last?.kind === "text") return [...parts.slice(0, -1), { ...last, text: last.text + event.text, tokens: [...last.tokens, ...event.tokens] }];
  if (event.text === "" || (parts.length > 0 && !event.text.trim())) return parts;
  return [...closed(parts, now), { kind: "text", text: event.text, tokens: event.tokens }];
}

function addCall(parts: Part[], event: StreamEvent & { type: "call" }): Part[] {
  const state: CallState = event.asking ? "asking" : "writing";
  const asked = parts.find((part) => part.kind === "call" && event.approval !== null && part.approval === event.approval);
  if (asked && !event.asking) {
    return parts.map((part) => (part === asked ? { ...asked, id: event.id, state: "running" as const } : part));
  }
  const { id, server, name, approval } = event;
  return [...parts, { kind: "call", id, server, name, arguments: event.arguments, state, output: null, error: null, approval }];
}

function changeCall(answer: AssistantMessage, id: string, change: (call: CallPart) => CallPart): AssistantMessage {
  return { ...answer, parts: answer.parts.map((part) => (part.kind === "call" && part.id === id ? change(part) : part)) };
}

/** The same with the time of reasoning that is open taken. */
function closed(parts: Part[], now: number): Part[] {
  return parts.map((part) => (part.kind === "reasoning" && part.ended === null ? { ...part, ended: now } : part));
}
