import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import type { ModelStatus } from "../src/api/server";

describe("one of several models", () => {
  let status: ModelStatus;
  let asked: string[];

  beforeEach(() => {
    vi.useFakeTimers();
    vi.resetModules();
    vi.stubGlobal("document", { baseURI: "http://localhost/" });
    for (const name of ["sessionStorage", "localStorage"]) vi.stubGlobal(name, { getItem: () => null });
    status = { value: "unloaded" };
    asked = [];
    vi.stubGlobal("fetch", (url: URL, options?: RequestInit) => {
      const path = url.pathname.slice(1) + url.search;
      asked.push(path);
      if (path === "v1/models/load") {
        expect(options?.body).toBe('{"model":"b"}');
        status = { value: "loading", doing: "Loading b", done: 3, total: 7 };
        return Promise.resolve(new Response("{}"));
      }
      if (path === "v1/props?model=b") return Promise.resolve(new Response(JSON.stringify({ default_generation_settings: { params: { top_k: 40 } }, modalities: { vision: true } })));
      if (path === "v1/props?model=a") return Promise.resolve(new Response(JSON.stringify({ error: { message: "it is unloaded", param: null } }), { status: 503 }));
      return Promise.resolve(new Response(JSON.stringify({ data: [{ id: "a", status: { value: "loaded" } }, { id: "b", status }] })));
    });
  });
  afterEach(() => {
    vi.useRealTimers();
    vi.unstubAllGlobals();
  });

  it("is loaded and waited for, and what it recommends is known then", async () => {
    const { refreshModels, sees, useServer, whenLoaded } = await import("../src/serverState");
    await refreshModels();
    expect(useServer.getState().defaults).toEqual({}); // a was unloaded before it could be asked
    expect(sees(useServer.getState(), "b")).toBeNull();
    let done = false;
    const waiting = whenLoaded("b").then(() => (done = true));
    await vi.advanceTimersByTimeAsync(1200);
    expect(done).toBe(false);
    expect(useServer.getState().models[1]?.status).toMatchObject({ value: "loading", done: 3 });
    status = { value: "loaded" };
    await vi.advanceTimersByTimeAsync(600);
    await waiting;
    expect(useServer.getState().defaults).toEqual({ b: { top_k: 40 } });
    expect([sees(useServer.getState(), "b"), sees(useServer.getState(), null)]).toEqual([true, null]);
    asked = [];
    await whenLoaded("b");
    await whenLoaded("unknown");
    expect(asked).toEqual([]);
  });

  it("says why it could not be loaded", async () => {
    const { refreshModels, whenLoaded } = await import("../src/serverState");
    await refreshModels();
    const waiting = expect(whenLoaded("b")).rejects.toThrow("it is cut short");
    await vi.advanceTimersByTimeAsync(10);
    status = { value: "failed", error: "it is cut short" };
    await vi.advanceTimersByTimeAsync(600);
    await waiting;
  });
});
