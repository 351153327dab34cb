import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";

const LOADING = { status: "loading", doing: "Loading m", done: 3, total: 7 };
const MODELS = { data: [{ id: "m", max_model_len: 64, status: { value: "loaded" } }] };
const LOADED: Record<string, unknown> = { ready: { status: "ready" }, "v1/models": MODELS, "v1/props": { default_generation_settings: { params: {} }, modalities: { vision: false } }, "v1/mcp/servers": { data: [] } };

describe("a server that is loading its model", () => {
  beforeEach(() => {
    vi.useFakeTimers();
    vi.stubGlobal("navigator", { languages: ["en"] });
    vi.stubGlobal("document", { baseURI: "http://localhost/" });
    for (const name of ["sessionStorage", "localStorage"]) vi.stubGlobal(name, { getItem: () => null });
  });
  afterEach(() => {
    vi.useRealTimers();
    vi.unstubAllGlobals();
  });

  it("is shown as that and asked until it has loaded", async () => {
    let loaded = false;
    vi.stubGlobal("fetch", (url: URL) => {
      const path = url.pathname.slice(1);
      if (loaded) return Promise.resolve(new Response(JSON.stringify(LOADED[path])));
      const body = path === "ready" ? LOADING : { error: { message: "the model is loading", param: null } };
      return Promise.resolve(new Response(JSON.stringify(body), { status: 503 }));
    });
    const { loadServer, useServer } = await import("../src/serverState");
    const done = loadServer();
    await vi.advanceTimersByTimeAsync(500);
    expect(useServer.getState()).toMatchObject({ loading: { doing: "Loading m", done: 3, total: 7 }, reachable: true, models: [] });
    loaded = true;
    await vi.advanceTimersByTimeAsync(1500);
    await done;
    expect(useServer.getState()).toMatchObject({ loading: null, reachable: true, models: MODELS.data });
  });

  it("is looked for until it answers, and an error of its own is no silence", async () => {
    let status = 0;
    vi.stubGlobal("fetch", (url: URL) => {
      if (status === 0) return Promise.reject(new TypeError("Failed to fetch"));
      return Promise.resolve(new Response(JSON.stringify(LOADED[url.pathname.slice(1)]), { status }));
    });
    vi.resetModules();
    const { loadServer, useServer } = await import("../src/serverState");
    await loadServer();
    expect(useServer.getState().reachable).toBe(false);
    await vi.advanceTimersByTimeAsync(60_000);
    expect(useServer.getState().reachable).toBe(false);
    status = 200;
    await vi.advanceTimersByTimeAsync(5000);
    expect(useServer.getState()).toMatchObject({ reachable: true, models: MODELS.data });
    status = 500;
    await loadServer();
    expect(useServer.getState().reachable).toBe(true);
  });
});
