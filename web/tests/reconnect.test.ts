import "fake-indexeddb/auto";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { textOf, type AssistantMessage } from "../src/store/messages";
import { path } from "../src/store/tree";
import { storage } from "./storage";

const ABOUT: Record<string, unknown> = { "/v1/models": { data: [{ id: "m" }] }, "/v1/props": { default_generation_settings: { params: {} }, modalities: { vision: false } }, "/v1/mcp/servers": { data: [] } };
const chunk = (delta: object, finish: string | null = null) => `data: ${JSON.stringify({ choices: [{ delta, finish_reason: finish }] })}\n\n`;

/** A stream of this text, whose connection then breaks, or that ends. */
function stream(text: string, breaks: boolean): Response {
  const body = new ReadableStream<Uint8Array>({
    pull(controller) {
      if (text) controller.enqueue(new TextEncoder().encode(text));
      text = "";
      if (breaks) controller.error(new TypeError("network error"));
      else controller.close();
    },
  }, { highWaterMark: 0 });
  return new Response(body);
}

const DONE = (text: string) => stream(`${chunk({ content: text }, "stop")}data: [DONE]\n\n`, false);

describe("an answer whose connection breaks", () => {
  const asked: { messages: { role: string; content: string }[]; continue_final_message?: boolean }[] = [];
  const answers: (() => Response)[] = [];
  let reachable = true;

  beforeEach(() => {
    vi.useFakeTimers({ toFake: ["setTimeout", "clearTimeout", "setInterval", "clearInterval"] });
    vi.stubGlobal("navigator", { languages: ["en"] });
    vi.stubGlobal("document", { baseURI: "http://localhost/" });
    for (const name of ["sessionStorage", "localStorage"]) vi.stubGlobal(name, storage());
    vi.stubGlobal("fetch", async (url: URL, options: RequestInit) => {
      if (!reachable) throw new TypeError("Failed to fetch");
      if (options.method !== "POST") return new Response(JSON.stringify(ABOUT[url.pathname]));
      asked.push(JSON.parse(options.body as string) as (typeof asked)[number]);
      return answers.shift()!();
    });
    asked.length = answers.length = 0;
    reachable = true;
  });
  afterEach(() => {
    vi.useRealTimers();
    vi.unstubAllGlobals();
  });

  async function begin() {
    const { createConversation, useConversations } = await import("../src/store/conversations");
    const run = await import("../src/chat/run");
    const { id } = createConversation();
    run.say(id, { text: "Hi", files: [], pictures: [] });
    return { run, id, last: () => path(useConversations.getState().loaded[id]!.tree).at(-1)!.message as AssistantMessage };
  }

  it("goes on where it was once the server is back", async () => {
    answers.push(() => ((reachable = false), stream(chunk({ content: "Hel" }), true)), () => DONE("lo."));
    const { last } = await begin();
    await vi.waitFor(() => expect(last().error).toContain("The connection to the server is lost."));
    expect(last()).toMatchObject({ state: "running", parts: [{ text: "Hel" }] });
    await vi.advanceTimersByTimeAsync(30_000);
    expect(asked).toHaveLength(1);
    reachable = true;
    await vi.advanceTimersByTimeAsync(6000);
    await vi.waitFor(() => expect(last()).toMatchObject({ state: "done", error: null }));
    expect(textOf(last())).toBe("Hello.");
    expect(asked[1]).toMatchObject({ continue_final_message: true, messages: [{ content: "Hi" }, { role: "assistant", content: "Hel" }] });
  });

  it("begins again where only thoughts had come", async () => {
    answers.push(() => stream(chunk({ reasoning_content: "Hm" }), true), () => DONE("Hello."));
    const { last } = await begin();
    await vi.advanceTimersByTimeAsync(1000);
    await vi.waitFor(() => expect(last().state).toBe("done"));
    expect(last().parts).toMatchObject([{ kind: "text", text: "Hello." }]);
    expect(asked[1]!.messages).toHaveLength(1);
  });

  it("can be stopped while the server is away", async () => {
    answers.push(() => ((reachable = false), stream(chunk({ content: "Hel" }), true)));
    const { run, id, last } = await begin();
    await vi.waitFor(() => expect(last().error).not.toBeNull());
    run.stop(id);
    await vi.waitFor(() => expect(last()).toMatchObject({ state: "stopped", error: null }));
    reachable = true;
    await vi.advanceTimersByTimeAsync(6000);
    expect(asked).toHaveLength(1);
  });

  it("fails, in words, when nothing comes however often it is asked for", async () => {
    answers.push(...Array.from({ length: 9 }, () => () => stream("", true)));
    const { last } = await begin();
    await vi.advanceTimersByTimeAsync(10_000);
    await vi.waitFor(() => expect(last().state).toBe("failed"));
    expect(last().error).toMatch(/^the connection to the server was lost/);
    expect(asked).toHaveLength(4);
  });
});

it("a tool that has run is not run again", async () => {
  const { newAnswer, resumable } = await import("../src/store/messages");
  const call = { kind: "call" as const, id: "c", server: "s", name: "n", arguments: "{}", state: "running" as const, output: null, error: null, approval: null };
  expect(resumable({ ...newAnswer("m", 0), parts: [call] })).toBeNull();
});
