import "fake-indexeddb/auto";
import { expect, it, vi } from "vitest";

vi.stubGlobal("navigator", { languages: ["en"] });
vi.stubGlobal("document", { baseURI: "http://localhost/" });
const storage = { getItem: () => null, setItem: () => {}, removeItem: () => {} };
vi.stubGlobal("localStorage", storage);
vi.stubGlobal("sessionStorage", storage);

const stream = `data: ${JSON.stringify({ choices: [{ delta: { content: "Hello." }, finish_reason: "stop" }] })}\n\ndata: [DONE]\n\n`;

it("says that a key is missing, and tries the turn again once there is one", async () => {
  const { createConversation, useConversations } = await import("../src/store/conversations");
  const { retryRefused, say, useRuns } = await import("../src/chat/run");
  const { path } = await import("../src/store/tree");
  const { textOf } = await import("../src/store/messages");
  const answers = [new Response(JSON.stringify({ error: { message: "invalid key", param: null } }), { status: 401 }), new Response(stream)];
  vi.stubGlobal("fetch", async () => answers.shift()!);
  const { id } = createConversation();
  const last = () => path(useConversations.getState().loaded[id]!.tree).at(-1)!.message;
  say(id, { text: "Hi", files: [], pictures: [] });
  await vi.waitFor(() => expect(useRuns.getState()).toEqual({}));
  expect(last()).toMatchObject({ state: "failed", error: expect.stringContaining("asks for a key") as string });
  retryRefused();
  await vi.waitFor(() => expect(last()).toMatchObject({ state: "done", error: null }));
  expect(textOf(last())).toBe("Hello.");
  expect(path(useConversations.getState().loaded[id]!.tree)).toHaveLength(2);
});
