import "fake-indexeddb/auto";
import { expect, it, vi } from "vitest";
import { storage } from "./storage";

vi.stubGlobal("navigator", { languages: ["en"] });
vi.stubGlobal("document", { baseURI: "http://localhost/" });
for (const name of ["sessionStorage", "localStorage"]) vi.stubGlobal(name, storage());

it.each([
  ["Trees", ["Trees"], "Trees (2)"],
  ["Trees", ["Trees", "Trees (2)"], "Trees (3)"],
  ["Trees (3)", ["Trees", "Trees (3)"], "Trees (2)"],
  ["", [], ""],
])("numbers the branches of %j among %j", async (title, titles, expected) => {
  const { branchTitle } = await import("../src/store/conversations");
  expect(branchTitle(title, titles)).toBe(expected);
});

const ANSWER = `data: ${JSON.stringify({ choices: [{ delta: { content: "Oaks." }, finish_reason: "stop" }] })}\n\ndata: [DONE]\n\n`;
const titled = (content: string) => new Response(JSON.stringify({ choices: [{ message: { content } }] }));

it.each([
  ["takes the model's title", () => titled('{"title": " On oaks "}'), "model", "", "On oaks"],
  ["keeps the first words unless the model is asked", () => titled('{"title": "On oaks"}'), "words", "", "Which trees?"],
  ["keeps them where the model fails", () => new Response("{}", { status: 500 }), "model", "", "Which trees?"],
  ["keeps them where the title is cut off", () => titled('{"title": "On o'), "model", "", "Which trees?"],
  ["keeps the name that a person has given meanwhile", () => titled('{"title": "On oaks"}'), "model", "Mine", "Mine"],
] as const)("%s", async (_, give, titles, renamed, expected) => {
  const { change, createConversation, useConversations } = await import("../src/store/conversations");
  const { usePreferences } = await import("../src/store/preferences");
  const { say, useRuns } = await import("../src/chat/run");
  usePreferences.getState().set({ titles });
  const asked: { response_format?: object; messages: object[] }[] = [];
  let told = false;
  const { id } = createConversation();
  vi.stubGlobal("fetch", async (_url: URL, options: RequestInit) => {
    asked.push(JSON.parse(options.body as string) as (typeof asked)[number]);
    if (!asked.at(-1)!.response_format) return new Response(ANSWER);
    if (renamed) change(id, (at) => ({ ...at, title: renamed }));
    told = true;
    return give();
  });
  say(id, { text: "Which trees?\nTell me.", files: [], pictures: [] });
  const now = () => useConversations.getState().loaded[id]!;
  expect(now().title).toBe("Which trees?");
  await vi.waitFor(() => expect(useRuns.getState()).toEqual({}));
  if (titles === "model") await vi.waitFor(() => expect(told).toBe(true));
  await vi.waitFor(() => expect(now().title).toBe(expected));
  await new Promise((done) => setTimeout(done, 20));
  expect(now().title).toBe(expected);
  if (titles === "model") expect(asked[1]!.messages).toMatchObject([{ role: "user" }, { role: "assistant", content: "Oaks." }, { role: "user" }]);
});
