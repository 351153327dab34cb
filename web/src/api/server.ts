/** What the server tells about itself. */

import { getJSON, postJSON, reach, request } from "./http";

/** Whether a model is loaded; one that is not is loaded by the first request for it. */
export interface ModelStatus {
  value: "unloaded" | "loading" | "loaded" | "sleeping" | "failed";
  /** What goes on while it loads, how many parts of that are done, and how many there are: 0 where they are not counted. */
  doing?: string;
  done?: number;
  total?: number;
  /** Why it could not be loaded. */
  error?: string;
}

export interface Model {
  id: string;
  status: ModelStatus;
  /** Null, as the two below, until the model was loaded for the first time. */
  max_model_len: number | null;
  /** False: a base model, which continues text and answers no chats. */
  has_chat_template: boolean | null;
  num_parameters: number | null;
}

export interface ToolServer {
  label: string;
  description: string | null;
  status: "starting" | "ready" | "failed" | "stopped";
  error: string | null;
  /** What the model calls them. */
  tools: string[];
}

/** What the checkpoint recommends; null where it says nothing. */
export type SamplingDefaults = Record<string, number | null>;

export interface ServerInfo {
  version: string;
  models: string[];
  settings: Record<string, unknown>;
  engine: Record<string, number>;
}

/** How far the server is with loading its model; `total` is 0 where the parts are not counted. */
export interface LoadingStage {
  doing: string;
  done: number;
  total: number;
}

/** Null where it is not loading. */
export async function loadingStage(): Promise<LoadingStage | null> {
  const told = (await (await reach("ready")).json()) as Partial<LoadingStage> & { status?: string };
  return told.status === "loading" ? { doing: told.doing ?? "", done: told.done ?? 0, total: told.total ?? 0 } : null;
}

export async function listModels(): Promise<Model[]> {
  return (await getJSON<{ data: Model[] }>("v1/models")).data;
}

/** Begin to load a model; `listModels` tells how far it is. */
export async function beginLoading(model: string): Promise<void> {
  await postJSON("v1/models/load", { model });
}

export interface Props {
  default_generation_settings: { params: SamplingDefaults };
  /** Whether it can be shown pictures. */
  modalities: { vision: boolean };
}

/** Of a model that is loaded. */
export function modelProps(model: string): Promise<Props> {
  return getJSON<Props>(`v1/props?model=${encodeURIComponent(model)}`);
}

/** The MCP servers of this server's configuration. */
export async function listToolServers(): Promise<ToolServer[]> {
  return (await getJSON<{ data: ToolServer[] }>("v1/mcp/servers")).data;
}

export async function countTokens(text: string, model: string | null, signal: AbortSignal): Promise<number> {
  const body = { prompt: text, add_special_tokens: false, ...(model === null ? {} : { model }) };
  return ((await (await postJSON("v1/tokenize", body, signal)).json()) as { count: number }).count;
}

export function serverInfo(): Promise<ServerInfo> {
  return getJSON<ServerInfo>("v1/server_info");
}

export async function metricsText(): Promise<string> {
  return (await request("metrics")).text();
}
