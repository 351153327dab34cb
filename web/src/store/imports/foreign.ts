/** Conversations of other programs, as both kinds of export have them: messages that name their parent. */

import { DEFAULTS } from "../../settings/fields";
import type { Conversation } from "../database";
import { newAnswer, type AssistantMessage, type Message, type Part } from "../messages";
import { append, EMPTY, lineage, ROOT, type Tree } from "../tree";

export interface Foreign {
  id: string;
  parent: string | null;
  /** Null: nothing that is shown; what follows it follows its parent. */
  message: Message | null;
}

/** The tree of these messages, under new ids, with `current` and what leads to it shown. Throws an Error where they are none. */
export function treeOf(all: Foreign[], current: string | null, newId: () => string): Tree {
  const known = new Map(all.map((one) => [one.id, one]));
  const children = new Map<string | null, Foreign[]>();
  for (const one of all) {
    const parent = one.parent !== null && known.has(one.parent) ? one.parent : null;
    children.set(parent, [...(children.get(parent) ?? []), one]);
  }
  let tree = EMPTY;
  let reached = 0;
  const placed = new Map<string, { id: string; straight: boolean }>(); // where it is here, or what it follows, and whether nothing branches off in between
  const queue = [...(children.get(null) ?? [])];
  for (let one = queue.shift(); one !== undefined; one = queue.shift()) {
    reached++;
    const above = (one.parent !== null && placed.get(one.parent)) || { id: ROOT, straight: true };
    const before = tree.nodes[above.id];
    const straight = above.straight && (children.get(one.parent)?.length ?? 0) === 1;
    if (one.message === null) placed.set(one.id, { id: above.id, straight });
    else if (straight && one.message.role === "assistant" && before?.message.role === "assistant") {
      tree = { ...tree, nodes: { ...tree.nodes, [before.id]: { ...before, message: joined(before.message, one.message) } } };
      placed.set(one.id, above);
    } else {
      const id = newId();
      tree = append(tree, above.id, id, one.message);
      placed.set(one.id, { id, straight: true });
    }
    queue.push(...(children.get(one.id) ?? []));
  }
  if (reached !== all.length) throw new Error("its messages are no tree");
  return shown(tree, (current !== null && placed.get(current)?.id) || ROOT);
}

/** The same with a message shown, and the last of the versions behind it. */
function shown(tree: Tree, id: string): Tree {
  const nodes = { ...tree.nodes };
  let { active } = tree;
  for (const node of lineage(tree, id)) {
    if (node.parent === ROOT) active = tree.children.indexOf(node.id);
    else nodes[node.parent] = { ...nodes[node.parent]!, active: nodes[node.parent]!.children.indexOf(node.id) };
  }
  return { ...tree, active, nodes };
}

function joined(before: AssistantMessage, after: AssistantMessage): AssistantMessage {
  return { ...before, parts: [...before.parts, ...after.parts], model: after.model || before.model };
}

export function question(text: string, seconds: unknown): Message {
  return { role: "user", text, files: [], created: milliseconds(seconds) };
}

export function answerOf(parts: Part[], model: unknown, seconds: unknown): Message {
  return { ...newAnswer(typeof model === "string" ? model : "", milliseconds(seconds)), parts, state: "done" };
}

export function textPart(text: string): Part {
  return { kind: "text", text, tokens: [] };
}

/** A thought that took so many seconds; 0: that is not known. */
export function thought(text: string, seconds = 0): Part {
  return { kind: "reasoning", text, started: 0, ended: 1000 * seconds };
}

export function conversationOf(title: unknown, tree: Tree, times: { created: unknown; updated: unknown }, newId: () => string, own: Partial<Conversation> = {}): Conversation {
  const created = milliseconds(times.created) || Date.now();
  return { id: newId(), title: typeof title === "string" ? title : "", pinned: false, created, updated: milliseconds(times.updated) || created, settings: DEFAULTS, tree, ...own };
}

/** Both programs count in seconds; what is no number is 0. */
function milliseconds(seconds: unknown): number {
  return typeof seconds === "number" && Number.isFinite(seconds) ? Math.round(seconds * 1000) : 0;
}
