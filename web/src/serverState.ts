/** What the page knows of the server: its models, their defaults, its tool servers. */

import { create } from "zustand";
import { APIError } from "./api/http";
import { listModels, listToolServers, loadingStage, samplingDefaults, type LoadingStage, type Model, type SamplingDefaults, type ToolServer } from "./api/server";

interface State {
  models: Model[];
  defaults: SamplingDefaults;
  toolServers: ToolServer[];
  reachable: boolean | null;
  loading: LoadingStage | null;
}

const POLL_MILLISECONDS = 1000;

export const useServer = create<State>()(() => ({ models: [], defaults: {}, toolServers: [], reachable: null, loading: null }));

export async function loadServer(): Promise<void> {
  try {
    const [models, defaults, toolServers] = await Promise.all([listModels(), samplingDefaults(), listToolServers()]);
    useServer.setState({ models, defaults, toolServers, reachable: true, loading: null });
  } catch (error) {
    const loading = error instanceof APIError && error.status === 503 ? await loadingStage().catch(() => null) : null;
    useServer.setState({ loading, reachable: loading !== null });
    if (loading !== null) await untilLoaded();
  }
}

/** Show how far the server is until it has loaded its model, and then ask again what it has. */
async function untilLoaded(): Promise<void> {
  try {
    for (let loading = await loadingStage(); loading !== null; loading = await loadingStage()) {
      useServer.setState({ loading });
      await new Promise((done) => setTimeout(done, POLL_MILLISECONDS));
    }
  } catch {
    useServer.setState({ loading: null, reachable: false });
    return;
  }
  await loadServer();
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
