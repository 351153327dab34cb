/** Requests to the server that this page comes from, with the key that it may ask for. */

const STORED = "jaxllm.key";

/** What the server said went wrong, or that it could not be reached (status 0). */
export class APIError extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly param: string | null = null,
    readonly code: string | null = null,
  ) {
    super(message);
  }
}

export function storedKey(): string {
  return sessionStorage.getItem(STORED) ?? localStorage.getItem(STORED) ?? "";
}

/** Keep the key until the tab is closed, or, if `remember`, in this browser. An empty one forgets it. */
export function storeKey(key: string, remember: boolean): void {
  sessionStorage.removeItem(STORED);
  localStorage.removeItem(STORED);
  if (key) (remember ? localStorage : sessionStorage).setItem(STORED, key);
}

let onUnauthorized: () => void = () => {};

/** Whom to tell when the server refuses the key. */
export function whenUnauthorized(handler: () => void): void {
  onUnauthorized = handler;
}

/** fetch() relative to the page, which may lie behind a proxy's path. Throws APIError where no answer comes. */
export async function reach(path: string, options: RequestInit = {}): Promise<Response> {
  const headers = new Headers(options.headers);
  const key = storedKey();
  if (key) headers.set("Authorization", `Bearer ${key}`);
  try {
    return await fetch(new URL(path, document.baseURI.split("#")[0]), { ...options, headers });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new APIError(0, error instanceof Error ? error.message : String(error));
  }
}

/** The same, which also throws APIError unless the answer is a good one. */
export async function request(path: string, options: RequestInit = {}): Promise<Response> {
  const response = await reach(path, options);
  if (response.ok) return response;
  const failure = await problem(response);
  if (response.status === 401) onUnauthorized();
  throw failure;
}

export async function getJSON<T>(path: string): Promise<T> {
  return (await request(path)).json() as Promise<T>;
}

export function postJSON(path: string, body: unknown, signal?: AbortSignal): Promise<Response> {
  const headers = { "Content-Type": "application/json" };
  return request(path, { method: "POST", body: JSON.stringify(body), headers, signal: signal ?? null });
}

async function problem(response: Response): Promise<APIError> {
  try {
    const { error } = (await response.json()) as { error: { message: string; param: string | null; code?: string | null } };
    return new APIError(response.status, error.message, error.param, error.code ?? null);
  } catch {
    return new APIError(response.status, `${response.status} ${response.statusText}`);
  }
}
