/** What the page knows of the server: its models, their defaults, its tool servers. */

import { create } from "zustand";
import { APIError } from "./api/http";
import { listModels, listToolServers, loadingStage, samplingDefaults, type LoadingStage, type Model, type SamplingDefaults, type ToolServer } from "./api/server";

interface State {
  models: Model[];
  defaults: SamplingDefaults;
  toolServers: ToolServer[];
  /** Null until it has been asked. False: it is asked again until it answers. */
  reachable: boolean | null;
  loading: LoadingStage | null;
}

const POLL_MILLISECONDS = 1000;
const FIRST_WAIT_MILLISECONDS = 500;
const LONGEST_WAIT_MILLISECONDS = 5000;

export const useServer = create<State>()(() => ({ models: [], defaults: {}, toolServers: [], reachable: null, loading: null }));

export async function loadServer(): Promise<void> {
  try {
    const [models, defaults, toolServers] = await Promise.all([listModels(), samplingDefaults(), listToolServers()]);
    useServer.setState({ models, defaults, toolServers, reachable: true, loading: null });
  } catch (error) {
    const loading = error instanceof APIError && error.status === 503 ? await loadingStage().catch(() => null) : null;
    useServer.setState({ loading, reachable: loading !== null || !isLost(error) });
    if (loading !== null) await untilLoaded();
    else if (isLost(error)) void untilReachable();
  }
}

/** Whether no server has answered: none was reached, or a proxy before it says that it reaches none. */
export function isLost(error: unknown): boolean {
  return error instanceof APIError && [0, 502, 503, 504].includes(error.status);
}

let search: Promise<void> | null = null;

/** Ask a server that has been lost again and again, less and less often, until it answers and has loaded its model. */
export function untilReachable(): Promise<void> {
  search ??= look().finally(() => (search = null));
  return search;
}

async function look(): Promise<void> {
  useServer.setState({ reachable: false });
  for (let wait = FIRST_WAIT_MILLISECONDS; ; wait = Math.min(2 * wait, LONGEST_WAIT_MILLISECONDS)) {
    await pause(wait);
    await loadServer();
    if (useServer.getState().reachable) return;
  }
}

function pause(milliseconds: number): Promise<void> {
  return new Promise((done) => setTimeout(done, milliseconds));
}

/** Show how far the server is until it has loaded its model, and then ask again what it has. */
async function untilLoaded(): Promise<void> {
  try {
    for (let loading = await loadingStage(); loading !== null; loading = await loadingStage()) {
      useServer.setState({ loading });
      await pause(POLL_MILLISECONDS);
    }
  } catch {
    useServer.setState({ loading: null, reachable: false });
    return void untilReachable();
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
