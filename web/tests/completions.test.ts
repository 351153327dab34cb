import { describe, expect, it } from "vitest";
import { completionEvents, completionRequest } from "../src/api/completions";
import { isBase } from "../src/serverState";
import { DEFAULTS } from "../src/settings/fields";
import { newAnswer, type Message } from "../src/store/messages";

const user = (text: string): Message => ({ role: "user", text, files: [], created: 0 });
const generated = (text: string): Message => ({ ...newAnswer("m", 0), parts: [{ kind: "text", text, tokens: [] }], state: "done" });

describe("a base model", () => {
  it("is one without a chat template", () => {
    const known = { max_model_len: 9, num_parameters: 0, status: { value: "loaded" as const } };
    const models = [{ id: "a", has_chat_template: false, ...known }, { id: "b", has_chat_template: true, ...known }];
    expect([isBase(models, null), isBase(models, "a"), isBase(models, "b"), isBase([], null)]).toEqual([true, true, false, false]);
  });

  it("goes on with all that was written and generated", () => {
    const settings = { ...DEFAULTS, system: "ignored", values: { top_k: 3, reasoning_effort: "low" }, logprobs: 2 };
    expect(completionRequest(settings, [user("Once"), generated(" upon"), user(" a")])).toEqual({
      prompt: "Once upon a", top_k: 3, logprobs: 2, max_tokens: 256, truncate_prompt_tokens: -1,
      stream: true, stream_options: { include_usage: true, continuous_usage_stats: true }, timings_per_token: true,
    });
    expect(completionRequest({ ...DEFAULTS, values: { max_completion_tokens: 9 } }, [user("a")])).toMatchObject({ max_tokens: 9 });
  });

  it("streams text with its tokens", () => {
    const logprobs: { tokens: string[]; token_logprobs: number[]; top_logprobs: Record<string, number>[] } = { tokens: [" a", "bytes:\\xe2"], token_logprobs: [-1, -2], top_logprobs: [{ " b": -3, " a": -1 }, {}] };
    expect([...completionEvents({ choices: [{ text: " a", logprobs, finish_reason: "length" }] })]).toEqual([
      {
        type: "text", text: " a",
        tokens: [
          { text: " a", logprob: -1, top: [{ text: " a", logprob: -1 }, { text: " b", logprob: -3 }] },
          { text: "\\xe2", logprob: -2, top: [] },
        ],
      },
      { type: "finish", reason: "length" },
    ]);
  });
});
