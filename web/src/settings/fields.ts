/** The settings of a conversation that become fields of its requests; data, from which form and requests are made. */

export type Kind = "number" | "integer" | "string" | "lines" | "integers" | "json" | "flag" | "choice";

export interface Field {
  /** In a chat request, and in a request for a response unless `response` says otherwise. */
  name: string;
  /** In a request for a response; null where that has no such field. */
  response?: string | null;
  kind: Kind;
  group: "sampling" | "penalties" | "length" | "tokens" | "scheduling";
  min?: number;
  max?: number;
  step?: number;
  choices?: string[];
}

export const FIELDS: Field[] = [
  { name: "temperature", kind: "number", group: "sampling", min: 0, step: 0.1 },
  { name: "top_p", kind: "number", group: "sampling", min: 0, max: 1, step: 0.05 },
  { name: "top_k", kind: "integer", group: "sampling", min: -1 },
  { name: "min_p", kind: "number", group: "sampling", min: 0, max: 1, step: 0.05 },
  { name: "seed", kind: "integer", group: "sampling" },
  { name: "presence_penalty", kind: "number", group: "penalties", min: -2, max: 2, step: 0.1 },
  { name: "frequency_penalty", kind: "number", group: "penalties", min: -2, max: 2, step: 0.1 },
  { name: "repetition_penalty", kind: "number", group: "penalties", min: 0.01, step: 0.05 },
  { name: "repeat_last_n", response: null, kind: "integer", group: "penalties", min: -1 },
  { name: "max_completion_tokens", response: "max_output_tokens", kind: "integer", group: "length", min: 1 },
  { name: "min_tokens", kind: "integer", group: "length", min: 0 },
  { name: "truncate_prompt_tokens", response: null, kind: "integer", group: "length", min: -1 },
  { name: "stop", kind: "lines", group: "length" },
  { name: "include_stop_str_in_output", kind: "flag", group: "length" },
  { name: "ignore_eos", kind: "flag", group: "length" },
  { name: "reasoning_effort", response: "reasoning.effort", kind: "choice", group: "length", choices: ["none", "minimal", "low", "medium", "high", "xhigh", "max"] },
  { name: "max_thinking_tokens", kind: "integer", group: "length", min: 0 },
  { name: "stop_token_ids", kind: "integers", group: "tokens" },
  { name: "allowed_token_ids", response: null, kind: "integers", group: "tokens" },
  { name: "bad_words", response: null, kind: "lines", group: "tokens" },
  { name: "logit_bias", kind: "json", group: "tokens" },
  { name: "skip_special_tokens", kind: "flag", group: "tokens" },
  { name: "chat_template_kwargs", kind: "json", group: "tokens" },
  { name: "priority", kind: "integer", group: "scheduling" },
  { name: "cache_salt", kind: "string", group: "scheduling" },
];

export type Value = string | number | boolean | string[] | number[] | Record<string, unknown>;

export type Structure = "none" | "json_object" | "json_schema" | "regex" | "choice" | "grammar";

/** Ask before every call, only before those that may change something, or never. */
export type Approval = "always" | "writes" | "never";

/** The model decides, must call some tool, or this one of a server's. */
export type ToolChoice = "auto" | "required" | { server: string; name: string };

export interface Settings {
  /** Null: the server's first. */
  model: string | null;
  system: string;
  values: Record<string, Value>;
  structure: Structure;
  /** The schema, expression, choices or grammar. */
  structureText: string;
  /** Alternatives asked for at each token; null: no log-probabilities. */
  logprobs: number | null;
  /** The MCP servers that are switched on. */
  servers: Record<string, Approval>;
  toolChoice: ToolChoice;
}

export const DEFAULTS: Settings = {
  model: null, system: "", values: {}, structure: "none", structureText: "", logprobs: null, servers: {}, toolChoice: "auto",
};

/** Whether the server runs tools for this conversation, which it does behind /v1/responses only. */
export function usesTools(settings: Settings): boolean {
  return Object.keys(settings.servers).length > 0;
}

/** The names of the settings that are set, but that a request with tools cannot have. */
export function lostWithTools(settings: Settings): string[] {
  const lost = FIELDS.filter((field) => field.response === null && field.name in settings.values).map((field) => field.name);
  if (["regex", "choice", "grammar"].includes(settings.structure)) lost.push(settings.structure);
  return lost;
}

/** Fields of a chat that have no meaning where a text is continued. */
const OF_CHATS = ["reasoning_effort", "max_thinking_tokens", "chat_template_kwargs"];

/** The fields of a request, for `api`. */
export function requestFields(settings: Settings, api: "chat" | "responses" | "completion"): Record<string, unknown> {
  const body: Record<string, unknown> = {};
  if (settings.model !== null) body.model = settings.model;
  for (const field of FIELDS) {
    const value = settings.values[field.name];
    const name = api !== "responses" ? field.name : field.response === undefined ? field.name : field.response;
    if (value === undefined || name === null || (api === "completion" && OF_CHATS.includes(name))) continue;
    const [outer, inner] = name.split(".") as [string, string | undefined];
    body[outer] = inner ? { [inner]: value } : value;
  }
  return body;
}

/** The field that constrains the answer. Throws SyntaxError where the schema is no JSON. */
export function structureFields(settings: Settings, api: "chat" | "responses"): Record<string, unknown> {
  const text = settings.structureText;
  switch (settings.structure) {
    case "none":
      return {};
    case "json_object":
      return api === "chat" ? { response_format: { type: "json_object" } } : { text: { format: { type: "json_object" } } };
    case "json_schema": {
      const schema = JSON.parse(text) as unknown;
      return api === "chat"
        ? { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } }
        : { text: { format: { type: "json_schema", name: "answer", schema } } };
    }
    case "choice":
      return api === "chat" ? { structured_outputs: { choice: text.split("\n").filter(Boolean) } } : {};
    default:
      return api === "chat" ? { structured_outputs: { [settings.structure]: text } } : {};
  }
}
