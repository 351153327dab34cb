/** What the page knows of the server: its models, their defaults, which of them see, its tool servers. */

import { create } from "zustand";
import { APIError } from "./api/http";
import { beginLoading, listModels, listToolServers, loadingStage, modelProps, type LoadingStage, type Model, type Props, type SamplingDefaults, type ToolServer } from "./api/server";

interface State {
  models: Model[];
  /** By the model's name, of those that have been seen loaded. */
  defaults: Record<string, SamplingDefaults>;
  /** Likewise: whether a model can be shown pictures. */
  vision: Record<string, boolean>;
  toolServers: ToolServer[];
  /** Null until it has been asked. False: it is asked again until it answers. */
  reachable: boolean | null;
  loading: LoadingStage | null;
}

const POLL_MILLISECONDS = 500;
const FIRST_WAIT_MILLISECONDS = 500;
const LONGEST_WAIT_MILLISECONDS = 5000;

export const useServer = create<State>()(() => ({ models: [], defaults: {}, vision: {}, toolServers: [], reachable: null, loading: null }));

export async function loadServer(): Promise<void> {
  try {
    const [, toolServers] = await Promise.all([refreshModels(), listToolServers()]);
    useServer.setState({ toolServers, reachable: true, loading: null });
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

/** Look again how far each model is, and what those recommend and can see that are loaded. */
export async function refreshModels(): Promise<void> {
  const models = await listModels();
  const unknown = models.filter(({ id, status }) => status.value === "loaded" && !(id in useServer.getState().defaults));
  const found = await Promise.all(unknown.map(async ({ id }) => [id, await modelProps(id).catch(unlessGone)] as const));
  const known = found.filter((pair): pair is [string, Props] => pair[1] !== null);
  const each = <T>(of: (props: Props) => T) => Object.fromEntries(known.map(([id, props]) => [id, of(props)]));
  useServer.setState(({ defaults, vision }) => ({
    models,
    defaults: { ...defaults, ...each((props) => props.default_generation_settings.params) },
    vision: { ...vision, ...each((props) => props.modalities.vision) },
  }));
}

/** A model may be unloaded while it is asked. */
function unlessGone(error: unknown): null {
  if (error instanceof APIError && error.status === 503) return null;
  throw error;
}

/** Have a model loaded, by default the first, and wait until it is; nothing is done where it is there. Throws APIError. */
export async function whenLoaded(name: string | null): Promise<void> {
  const { models } = useServer.getState();
  const model = name === null ? models[0] : models.find(({ id }) => id === name);
  if (!model || model.status.value === "loaded") return;
  await beginLoading(model.id);
  for (;;) {
    await refreshModels();
    const status = modelOf(useServer.getState().models, model.id)?.status;
    if (status?.value === "failed") throw new APIError(503, status.error ?? "");
    if (status?.value !== "loading") return;
    await pause(POLL_MILLISECONDS);
  }
}

/** Look again how the tool servers are; what was known stays where the server does not answer. */
export async function refreshToolServers(): Promise<void> {
  await listToolServers().then((toolServers) => useServer.setState({ toolServers }), () => {});
}

/** The model of that name, the first one by default. */
export function modelOf(models: Model[], name: string | null): Model | undefined {
  return models.find((model) => model.id === name) ?? models[0];
}

/** Whether a model, by default the first one, only continues text. */
export function isBase(models: Model[], name: string | null): boolean {
  return modelOf(models, name)?.has_chat_template === false;
}

/** Whether a model, by default the first one, can be shown pictures; null until it was loaded. */
export function sees({ models, vision }: State, name: string | null): boolean | null {
  return isBase(models, name) ? false : (vision[modelOf(models, name)?.id ?? ""] ?? null);
}

/** The context of a model, of the first one by default. */
export function contextOf(models: Model[], name: string | null): number | null {
  return modelOf(models, name)?.max_model_len ?? null;
}
