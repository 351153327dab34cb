/** What the page knows of the server: its models, their defaults, its tool servers. */

import { create } from "zustand";
import { listModels, listToolServers, samplingDefaults, type Model, type SamplingDefaults, type ToolServer } from "./api/server";

interface State {
  models: Model[];
  defaults: SamplingDefaults;
  toolServers: ToolServer[];
  reachable: boolean | null;
}

export const useServer = create<State>()(() => ({ models: [], defaults: {}, toolServers: [], reachable: null }));

export async function loadServer(): Promise<void> {
  try {
    const [models, defaults, toolServers] = await Promise.all([listModels(), samplingDefaults(), listToolServers()]);
    useServer.setState({ models, defaults, toolServers, reachable: true });
  } catch {
    useServer.setState({ reachable: false });
  }
}

/** Look again how the tool servers are; what was known stays where the server does not answer. */
export async function refreshToolServers(): Promise<void> {
  await listToolServers().then((toolServers) => useServer.setState({ toolServers }), () => {});
}

/** Whether a model, by default the first one, only continues text. */
export function isBase(models: Model[], name: string | null): boolean {
  return (models.find((model) => model.id === name) ?? models[0])?.has_chat_template === false;
}

/** The context of a model, of the first one by default. */
export function contextOf(models: Model[], name: string | null): number | null {
  return (models.find((model) => model.id === name) ?? models[0])?.max_model_len ?? null;
}
