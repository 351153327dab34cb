import { describe, expect, it } from "vitest";
import { canContinue, decide, ended, grow, newAnswer, pendingCalls, textOf, type AssistantMessage, type StreamEvent } from "../src/store/messages";

const text = (said: string): StreamEvent => ({ type: "text", text: said, tokens: [] });
const call = (id: string, asking: boolean, approval: string | null): StreamEvent => ({
  type: "call", id, server: "clock", name: "now", arguments: asking ? "{}" : "", asking, approval,
});

/** Events a second apart, of a request sent at 0. */
function grown(events: StreamEvent[], answer = newAnswer("m", 0)): AssistantMessage {
  return events.reduce((at, event, index) => grow(at, event, 1000 * (index + 1), 0), answer);
}

describe("an answer", () => {
  it("joins text, and keeps reasoning apart with its time", () => {
    const answer = grown([{ type: "reasoning", text: "I " }, { type: "reasoning", text: "think" }, text("\n\n"), text("So"), text(".")]);
    expect(answer.parts).toEqual([
      { kind: "reasoning", text: "I think", started: 1000, ended: 4000 },
      { kind: "text", text: "So.", tokens: [] },
    ]);
    expect(answer.stats?.firstTokenMs).toBe(1000);
  });

  it("follows a call from its arguments to its result", () => {
    const begun = grown([text("Let me look."), call("c1", false, null), { type: "arguments", id: "c1", text: '{"a"' }, { type: "arguments", id: "c1", text: ":1}" }]);
    expect(begun.parts[1]).toMatchObject({ arguments: '{"a":1}', state: "writing" });
    const answer = grown([{ type: "ready", id: "c1", arguments: '{"a":1}' }, { type: "result", id: "c1", output: "12:00", error: null }, text("Noon.")], begun);
    expect(answer.parts[1]).toMatchObject({ state: "done", output: "12:00" });
    expect(textOf(answer)).toBe("Let me look.\n\nNoon.");
  });

  it("waits for every approval, and takes the call for the one that was asked for", () => {
    const asking = grown([call("r1", true, "r1"), call("r2", true, "r2"), { type: "finish", reason: "stop" }]);
    expect(asking.state).toBe("asking");
    const decided = decide(decide(asking, "r1", true), "r2", false);
    expect(pendingCalls(decided)).toEqual([]);
    const done = grown([call("c1", false, "r1"), { type: "result", id: "c1", output: "12:00", error: null }, { type: "finish", reason: "stop" }], decided);
    expect(done.parts).toMatchObject([{ id: "c1", state: "done" }, { id: "r2", state: "denied" }]);
    expect(done.state).toBe("done");
  });

  it("stops what is open when it is stopped", () => {
    const answer = ended(grown([{ type: "reasoning", text: "Hm" }, call("c1", false, null)]), "stopped", 9000);
    expect(answer.parts).toMatchObject([{ ended: 2000 }, { state: "stopped" }]);
  });

  it("can be continued where text was cut off, and nowhere else", () => {
    const cut = grown([text("Once upon"), { type: "finish", reason: "length" }]);
    expect(cut.state).toBe("cut");
    expect(canContinue(cut)).toBe(true);
    expect(canContinue(grown([text("The end."), { type: "finish", reason: "stop" }]))).toBe(false);
    expect(canContinue(ended(grown([{ type: "reasoning", text: "Hm" }]), "stopped", 0))).toBe(false);
  });
});
