import { expect, it, vi } from "vitest";
import { summaryRequest } from "../src/api/summary";
import { DEFAULTS } from "../src/settings/fields";
import { contextUsed, newAnswer, type AssistantMessage, type Message } from "../src/store/messages";
import { append, branch, EMPTY, lineage, path, read, ROOT, type Tree } from "../src/store/tree";
import { storage } from "./storage";

vi.stubGlobal("navigator", { languages: ["en"] });
vi.stubGlobal("localStorage", storage());
const { nextFrom, partsOf } = await import("../src/chat/full");

const user = (text: string, from?: string): Message => ({ role: "user", text, files: [], created: 0, ...(from ? { from } : {}) });
const answer = (text: string): AssistantMessage => ({ ...newAnswer("m", 0), parts: [{ kind: "text", text, tokens: [] }], state: "done" });
const tree = (...messages: Message[]): Tree => messages.reduce<Tree>((at, message, index) => append(at, index ? `n${index - 1}` : ROOT, `n${index}`, message), EMPTY);
const ids = (nodes: { id: string }[]) => nodes.map(({ id }) => id);

it("leaves out whole turns, the oldest half of what is read, but never the last", () => {
  const alike = tree(user("q".repeat(90)), answer("a".repeat(90)), user("q".repeat(90)), answer("a".repeat(90)), user("q"), newAnswer("m", 0));
  expect(nextFrom(path(alike))).toEqual({ at: "n4", from: "n4" });
  const short = tree(user("q".repeat(500)), answer("a"), user("q"), answer("a"), user("q"), newAnswer("m", 0));
  expect(nextFrom(path(short))).toEqual({ at: "n4", from: "n2" });
  expect(nextFrom(path(short).slice(2))).toEqual({ at: "n4", from: "n4" });
  expect(nextFrom(path(short).slice(4))).toBeNull();
  const long = tree(user("q"), answer("a"), user("q".repeat(500)), newAnswer("m", 0));
  expect(nextFrom(path(long))).toEqual({ at: "n2", from: "n2" });
});

it("reads from the last place that was chosen on, in the branches that have it", () => {
  const chosen = tree(user("1"), answer("2"), user("3", "n2"), answer("4"), user("5"));
  expect(ids(read(path(chosen)))).toEqual(["n2", "n3", "n4"]);
  const both = branch(chosen, "n1", "other", answer("otherwise"));
  expect(ids(read(lineage(both, "other")))).toEqual(["n0", "other"]);
  expect(ids(read(path(tree(user("1"), answer("2")))))).toEqual(["n0", "n1"]);
});

it("takes a picture for what the model reads of it, not for its bytes", () => {
  const pictures = [{ name: "a.png", url: `data:image/png;base64,${"A".repeat(100_000)}` }];
  const shown = tree({ ...user("q"), pictures } as Message, answer("a".repeat(20_000)), user("q"), answer("a".repeat(20_000)), user("q"), newAnswer("m", 0));
  expect(nextFrom(path(shown))).toEqual({ at: "n4", from: "n2" });
  const last = tree(user("q".repeat(20_000)), answer("a"), user("q"), answer("a"), { ...user("q"), pictures } as Message, newAnswer("m", 0));
  expect(nextFrom(path(last))).toEqual({ at: "n4", from: "n2" });
});

it("cuts a text into parts at line ends", () => {
  const text = "0123456\n89\nabcdefgh";
  expect(partsOf(text, 2)).toEqual(["0123456\n89\n", "abcdefgh"]);
  expect(partsOf("😀😀😀", 2)).toEqual(["😀😀", "😀"]);
  for (const count of [1, 2, 3, 7, 100]) {
    expect(partsOf(text, count).join("")).toBe(text);
    expect(Math.max(...partsOf(text, count).map((part) => part.length))).toBeLessThanOrEqual(Math.ceil(text.length / count) + 1);
  }
});

it("asks for a summary of each part with that of the parts before it", () => {
  const body = summaryRequest({ ...DEFAULTS, model: "m", system: "Be brief." }, "so far", "## You\n\n```\nx\n```", 64) as { messages: { content: string }[] };
  expect(body).toMatchObject({ model: "m", max_completion_tokens: 64, temperature: 0, tools: [], reasoning_effort: "none" });
  expect(body.messages).toHaveLength(1);
  expect(body.messages[0]!.content).toMatch(/^A summary of what came before:\n\nso far\n\n````\n## You\n\n```\nx\n```\n````\n\nSummarize/);
  expect((summaryRequest(DEFAULTS, "", "x", 64) as typeof body).messages[0]!.content).toMatch(/^```\nx\n/);
});

it("counts the context by the last prompt that was counted, and what was said since", () => {
  const stats = (promptTokens: number, completionTokens: number) => ({ promptTokens, completionTokens, cachedTokens: 0, reasoningTokens: 0, firstTokenMs: null, tokensPerSecond: null });
  const first = { ...answer("a"), stats: stats(10, 5) };
  expect(contextUsed([])).toBe(0);
  expect(contextUsed([user("q"), first])).toBe(15);
  expect(contextUsed([user("q"), first, user("q"), newAnswer("m", 0)])).toBe(15);
  expect(contextUsed([user("q"), first, user("q"), { ...answer("a"), stats: stats(0, 3) }])).toBe(18);
  expect(contextUsed([user("q"), first, user("q"), { ...answer("a"), stats: stats(20, 3) }])).toBe(23);
});
