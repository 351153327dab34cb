/** What a person may do in a conversation: say, edit, regenerate, continue, approve, stop. One answer runs in each. */

import { create } from "zustand";
import { streamChat } from "../api/chat";
import { streamCompletion } from "../api/completions";
import { APIError } from "../api/http";
import { streamResponse } from "../api/responses";
import { translate } from "../i18n";
import type { Texts } from "../i18n/en";
import { isBase, isLost, untilReachable, useServer, whenLoaded } from "../serverState";
import { usesTools } from "../settings/fields";
import { change, changeMessage, changeTree, newId, useConversations, writeAll } from "../store/conversations";
import { decide, ended, grow, newAnswer, pendingCalls, resumable, type AssistantMessage, type Message, type StreamEvent, type UserMessage } from "../store/messages";
import type { Draft } from "../store/drafts";
import { usePreferences } from "../store/preferences";
import { append, branch, lineage, path, read, ROOT } from "../store/tree";
import { firstWords, nameAfterAnswer } from "./titles";

/** How often in a row a connection may break before anything has come. */
const MAX_FAILURES = 3;

/** Conversation -> what stops its answer. */
export const useRuns = create<Record<string, AbortController>>()(() => ({}));

export function stop(id: string): void {
  useRuns.getState()[id]?.abort();
}

export function stopAll(): void {
  Object.keys(useRuns.getState()).forEach(stop);
}

/** Say something at the end of what is shown; approvals that are still asked for there are refused. */
export function say(id: string, draft: Draft): void {
  const last = path(conversation(id).tree).at(-1);
  if (last?.message.role === "assistant") {
    changeMessage(id, last.id, onAnswer((answer) => {
      const refused = pendingCalls(answer).reduce((at, call) => decide(at, call.id, false), answer);
      return refused.state === "asking" ? { ...refused, state: "done" } : refused;
    }));
  }
  const userId = newId();
  const said: UserMessage = { role: "user", ...draft, created: Date.now() };
  changeTree(id, (tree) => append(tree, last?.id ?? ROOT, userId, said));
  change(id, (at) => (at.title ? at : { ...at, title: firstWords(said) }));
  if (draft.pictures.length) void writeAll(); // of what waits when the page is closed, only a few megabytes can be kept
  answer(id, userId);
}

/** Say something else instead of an earlier message, and answer that. */
export function editUser(id: string, messageId: string, text: string): void {
  const { message } = node(id, messageId);
  if (message.role !== "user") return;
  const editedId = newId();
  changeTree(id, (tree) => branch(tree, messageId, editedId, { ...message, text, created: Date.now() }));
  answer(id, editedId);
}

/** Put words into the model's mouth, as an alternative to what it said. */
export function editAnswer(id: string, messageId: string, text: string): void {
  const { message } = node(id, messageId);
  if (message.role !== "assistant") return;
  const edited: AssistantMessage = { ...message, parts: [{ kind: "text", text, tokens: [] }], state: "stopped", error: null, stats: null };
  changeTree(id, (tree) => branch(tree, messageId, newId(), edited));
}

/** Another answer to the same. */
export function regenerate(id: string, messageId: string): void {
  answer(id, node(id, messageId).parent);
}

export function continueAnswer(id: string, messageId: string): void {
  changeMessage(id, messageId, onAnswer((at) => ({ ...at, state: "running", error: null })));
  void run(id, messageId);
}

/** Answer one request for approval; when none is left, the model goes on. */
export function approve(id: string, messageId: string, callId: string, yes: boolean): void {
  changeMessage(id, messageId, onAnswer((at) => decide(at, callId, yes)));
  const { message } = node(id, messageId);
  if (message.role === "assistant" && pendingCalls(message).length === 0) continueAnswer(id, messageId);
}

function answer(id: string, parent: string): void {
  const messageId = newId();
  const model = conversation(id).settings.model ?? useServer.getState().models[0]?.id ?? "";
  changeTree(id, (tree) => append(tree, parent, messageId, newAnswer(model, Date.now())));
  void run(id, messageId);
}

/** What takes in the events that have come, for each answer under way. */
const intakes = new Set<() => void>();

/** Take in at once all that has come. */
export function takeIn(): void {
  for (const apply of intakes) apply();
}

/** Fill an answer until its stream ends; its events are taken in once a frame. */
async function run(id: string, messageId: string): Promise<void> {
  stop(id);
  const controller = new AbortController();
  useRuns.setState({ [id]: controller });
  const sent = Date.now();
  const waiting: [StreamEvent, number][] = [];
  const apply = () => {
    const events = waiting.splice(0);
    if (events.length) changeMessage(id, messageId, onAnswer((at) => events.reduce((grown, [event, when]) => grow(grown, event, when, sent), at)));
  };
  intakes.add(apply);
  const timer = setInterval(apply, 33); // a frame does not come while the tab is hidden
  const end = (by: (at: AssistantMessage) => AssistantMessage) => {
    apply();
    changeMessage(id, messageId, onAnswer(by));
  };
  try {
    for (let failures = 0; ; ) {
      try {
        await Promise.race([whenLoaded(conversation(id).settings.model), whenAborted(controller.signal)]);
        for await (const event of events(id, messageId, controller.signal)) {
          waiting.push([event, Date.now()]);
          failures = 0;
        }
        break;
      } catch (error) {
        apply();
        if (!connectionBroke(error) || ++failures > MAX_FAILURES || !goBack(id, messageId)) throw error;
        await Promise.race([untilReachable(), whenAborted(controller.signal)]);
        changeMessage(id, messageId, onAnswer((at) => ({ ...at, error: null })));
      }
    }
    end((at) => (at.state === "running" ? ended(at, "done", Date.now()) : at));
    void nameAfterAnswer(id);
  } catch (error) {
    if (error instanceof APIError && error.status === 401) refused.set(messageId, id);
    if (controller.signal.aborted) end((at) => ended(at, "stopped", Date.now()));
    else end((at) => ({ ...ended(at, "failed", Date.now(), describe(error)), full: error instanceof APIError && error.code === "context_length_exceeded" }));
  } finally {
    clearInterval(timer);
    intakes.delete(apply);
    const { [id]: mine, ...others } = useRuns.getState();
    if (mine === controller) useRuns.setState(others, true);
  }
}

/** Make an answer ready to be asked for again; false where that cannot be done. */
function goBack(id: string, messageId: string): boolean {
  const { message } = node(id, messageId);
  const kept = message.role === "assistant" ? resumable(message) : null;
  if (kept) changeMessage(id, messageId, () => ({ ...kept, error: words("reconnecting") }));
  return kept !== null;
}

function connectionBroke(error: unknown): boolean {
  return error instanceof APIError && error.status !== 503 && isLost(error);
}

function whenAborted(signal: AbortSignal): Promise<never> {
  return new Promise((_, reject) => {
    const fail = () => reject(new DOMException("stopped", "AbortError"));
    if (signal.aborted) fail();
    signal.addEventListener("abort", fail, { once: true });
  });
}

/** Answers that the server refused for want of a key: message -> conversation. */
const refused = new Map<string, string>();

/** Try them again, now that there is a key. */
export function retryRefused(): void {
  for (const [messageId, id] of refused) if (useConversations.getState().loaded[id]?.tree.nodes[messageId]) continueAnswer(id, messageId);
  refused.clear();
}

function events(id: string, messageId: string, signal: AbortSignal): AsyncGenerator<StreamEvent> {
  const { settings, tree } = conversation(id);
  const history: Message[] = read(lineage(tree, messageId)).map((at) => at.message);
  const last = history.at(-1);
  if (last?.role === "assistant" && last.parts.length === 0) history.pop();
  if (isBase(useServer.getState().models, settings.model)) return streamCompletion(settings, history, signal);
  const approves = last?.role === "assistant" && last.parts.at(-1)?.kind === "call";
  return approves || (usesTools(settings) && history.at(-1)?.role === "user") ? streamResponse(settings, history, signal) : streamChat(settings, history, signal);
}

function describe(error: unknown): string {
  if (error instanceof APIError && error.status === 401) return words("keyMissing");
  if (connectionBroke(error)) return words("connectionLost");
  return error instanceof Error ? error.message : String(error);
}

function words(name: keyof Texts): string {
  return translate(usePreferences.getState().language)(name);
}

function conversation(id: string) {
  const found = useConversations.getState().loaded[id];
  if (!found) throw new Error(`conversation ${id} is not loaded`);
  return found;
}

function node(id: string, messageId: string) {
  const found = conversation(id).tree.nodes[messageId];
  if (!found) throw new Error(`message ${messageId} is gone`);
  return found;
}

function onAnswer(by: (answer: AssistantMessage) => AssistantMessage): (message: Message) => Message {
  return (message) => (message.role === "assistant" ? by(message) : message);
}
