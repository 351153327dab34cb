import { describe, expect, it } from "vitest";
import { chatRequest } from "../src/api/chat";
import { withFiles } from "../src/api/files";
import { responseRequest } from "../src/api/responses";
import { DEFAULTS, lostWithTools, type Settings } from "../src/settings/fields";
import { newAnswer, type AssistantMessage, type CallPart, type Message, type Part, type UserMessage } from "../src/store/messages";

const asked: UserMessage = { role: "user", text: "What time is it?", files: [], created: 0 };
const call: CallPart = {
  kind: "call", id: "c1", server: "clock", name: "now", arguments: "{}", state: "done", output: "12:00", error: null, approval: null,
};
const answered = (...parts: Part[]): AssistantMessage => ({ ...newAnswer("m", 0), parts, state: "done" });
const text = (said: string): Part => ({ kind: "text", text: said, tokens: [] });
const settings = (change: Partial<Settings>): Settings => ({ ...DEFAULTS, ...change });

describe("a chat request", () => {
  it("has what was set and nothing else", () => {
    const body = chatRequest(settings({ system: "Be brief.", values: { temperature: 0, stop: ["\n"] }, logprobs: 5 }), [asked]);
    expect(body).toEqual({
      messages: [{ role: "system", content: "Be brief." }, { role: "user", content: "What time is it?" }],
      temperature: 0, stop: ["\n"], logprobs: true, top_logprobs: 5,
      tools: [], stream: true, stream_options: { include_usage: true, continuous_usage_stats: true }, timings_per_token: true,
    });
  });

  it("continues an answer that comes last", () => {
    const body = chatRequest(DEFAULTS, [asked, answered(text("It is"))]);
    expect(body).toMatchObject({ continue_final_message: true, messages: [{}, { role: "assistant", content: "It is" }] });
  });

  it("tells of earlier calls as one tool message each", () => {
    const { messages } = chatRequest(DEFAULTS, [asked, answered(text("Let me see."), call, { ...call, id: "c2" }, text("Noon."))]) as { messages: object[] };
    expect(messages.slice(1)).toEqual([
      { role: "assistant", content: "Let me see.", tool_calls: ["c1", "c2"].map((id) => ({ id, type: "function", function: { name: "clock_now", arguments: "{}" } })) },
      { role: "tool", tool_call_id: "c1", content: "12:00" },
      { role: "tool", tool_call_id: "c2", content: "12:00" },
      { role: "assistant", content: "Noon." },
    ]);
  });

  it("constrains the answer", () => {
    const schema = { type: "object" };
    expect(chatRequest(settings({ structure: "json_schema", structureText: JSON.stringify(schema) }), [asked])).toMatchObject({
      response_format: { type: "json_schema", json_schema: { schema } },
    });
    expect(chatRequest(settings({ structure: "choice", structureText: "yes\nno\n" }), [asked])).toMatchObject({ structured_outputs: { choice: ["yes", "no"] } });
  });
});

describe("a request for a response", () => {
  const tools = settings({ servers: { clock: "always", files: "writes" } });

  it("names the tool servers and when to ask", () => {
    expect(responseRequest(tools, [asked])).toMatchObject({
      store: false,
      tools: [
        { type: "mcp", server_label: "clock", require_approval: "always" },
        { type: "mcp", server_label: "files", require_approval: { never: { read_only: true } } },
      ],
    });
  });

  it("forces a call where the person has asked, and none once approvals are answered", () => {
    expect(responseRequest(tools, [asked])).not.toHaveProperty("tool_choice");
    expect(responseRequest({ ...tools, toolChoice: "required" }, [asked])).toMatchObject({ tool_choice: "required" });
    const named: Settings = { ...tools, toolChoice: { server: "clock", name: "now" } };
    expect(responseRequest(named, [asked])).toMatchObject({ tool_choice: { type: "mcp", server_label: "clock", name: "now" } });
    expect(responseRequest(named, [asked, answered({ ...call, approval: "r1", state: "denied", output: null })])).not.toHaveProperty("tool_choice");
  });

  it("gives fields the names that they have there, and leaves out those that it lacks", () => {
    const values = { max_completion_tokens: 9, reasoning_effort: "low", bad_words: ["x"], top_k: 3 };
    const body = responseRequest(settings({ values }), [asked]);
    expect(body).toMatchObject({ max_output_tokens: 9, reasoning: { effort: "low" }, top_k: 3 });
    expect(body).not.toHaveProperty("bad_words");
    expect(lostWithTools(settings({ values, structure: "regex" }))).toEqual(["bad_words", "regex"]);
  });

  it("sends the answers to all requests behind them", () => {
    const request = (id: string, state: CallPart["state"]): Part => ({ ...call, id, approval: id, state, output: null });
    const history: Message[] = [asked, answered(request("r1", "approved"), request("r2", "denied"))];
    const { input } = responseRequest(tools, history) as { input: { type?: string }[] };
    expect(input.slice(1)).toMatchObject([
      { type: "mcp_approval_request", id: "r1" },
      { type: "mcp_approval_request", id: "r2" },
      { type: "mcp_approval_response", approval_request_id: "r1", approve: true },
      { type: "mcp_approval_response", approval_request_id: "r2", approve: false },
    ]);
  });
});

describe("pictures", () => {
  const pictures = ["AA", "BB"].map((data) => ({ name: `${data}.png`, url: `data:image/png;base64,${data}==` }));
  const shown = { ...asked, pictures, files: [{ name: "a.md", text: "x" }] };

  it("come in their order before the text", () => {
    const { messages } = chatRequest(DEFAULTS, [shown, answered(text("Noon.")), { ...asked, pictures, text: "" }]) as { messages: { content: object[] }[] };
    const parts = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
    expect(messages[0]!.content).toEqual([...parts, { type: "text", text: "a.md:\n```\nx\n```\n\nWhat time is it?" }]);
    expect(messages[2]!.content).toEqual(parts);
  });

  it("are sent with tools too", () => {
    const { input } = responseRequest(settings({ servers: { clock: "always" } }), [shown]) as { input: { content: object[] }[] };
    expect(input[0]!.content).toEqual([...pictures.map(({ url }) => ({ type: "input_image", image_url: url })), { type: "input_text", text: "a.md:\n```\nx\n```\n\nWhat time is it?" }]);
  });
});

describe("withFiles", () => {
  it("puts each file into a fence that it cannot close", () => {
    const message = { ...asked, files: [{ name: "a.md", text: "```\ncode\n```" }] };
    expect(withFiles(message)).toBe("a.md:\n````\n```\ncode\n```\n````\n\nWhat time is it?");
  });
});
