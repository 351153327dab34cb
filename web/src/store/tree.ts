/** A conversation's messages as a tree: each may have several continuations, of which one is shown. Pure functions. */

import type { Message } from "./messages";

export const ROOT = "root";

export interface TreeNode {
  id: string;
  parent: string;
  children: string[];
  /** Which of the children is shown. */
  active: number;
  message: Message;
  /** How often the message was changed, so that of two copies the newer one is known; left out: never. */
  revision?: number;
}

export interface Tree {
  /** The first messages; several when the first has been edited. */
  children: string[];
  active: number;
  nodes: Record<string, TreeNode>;
  /** Messages that were deleted, so that another tab's copy does not bring them back. */
  removed?: string[];
}

export const EMPTY: Tree = { children: [], active: 0, nodes: {} };

/** The messages that are shown, first to last. */
export function path(tree: Tree): TreeNode[] {
  const shown: TreeNode[] = [];
  for (let at: Tree | TreeNode | undefined = tree; at; ) {
    const next: TreeNode | undefined = tree.nodes[at.children[at.active] ?? ""];
    if (next) shown.push(next);
    at = next;
  }
  return shown;
}

/** From the first message down to this one. */
export function lineage(tree: Tree, id: string): TreeNode[] {
  const found: TreeNode[] = [];
  for (let node = tree.nodes[id]; node; node = tree.nodes[node.parent]) found.unshift(node);
  return found;
}

/** Those of a conversation's messages that the model reads. */
export function read(nodes: TreeNode[]): TreeNode[] {
  const from = nodes.map(({ message }) => (message.role === "user" ? message.from : undefined)).findLast((id) => id !== undefined);
  return nodes.slice(Math.max(nodes.findIndex(({ id }) => id === from), 0));
}

/** Put a message behind `parent`, as the continuation that is shown. */
export function append(tree: Tree, parent: string, id: string, message: Message): Tree {
  const node: TreeNode = { id, parent, children: [], active: 0, message };
  const added = { ...tree, nodes: { ...tree.nodes, [id]: node } };
  return change(added, parent, (at) => ({ children: [...at.children, id], active: at.children.length }));
}

/** Put a message beside `id`, as an alternative to it. */
export function branch(tree: Tree, id: string, newId: string, message: Message): Tree {
  const node = tree.nodes[id];
  return node ? append(tree, node.parent, newId, message) : tree;
}

export function update(tree: Tree, id: string, by: (message: Message) => Message): Tree {
  const node = tree.nodes[id];
  return node ? { ...tree, nodes: { ...tree.nodes, [id]: { ...node, message: by(node.message), revision: (node.revision ?? 0) + 1 } } } : tree;
}

/** Where a message stands among its alternatives, from 0. */
export function place(tree: Tree, id: string): { index: number; count: number } {
  const { children } = parentOf(tree, id);
  return { index: children.indexOf(id), count: children.length };
}

/** Show the alternative `step` places on; at the ends nothing changes. */
export function step(tree: Tree, id: string, by: number): Tree {
  const parent = tree.nodes[id]?.parent ?? ROOT;
  const { index, count } = place(tree, id);
  const active = Math.min(Math.max(index + by, 0), count - 1);
  return change(tree, parent, (at) => ({ children: at.children, active }));
}

/** Without a message and all behind it; the alternative before it is shown. */
export function remove(tree: Tree, id: string): Tree {
  const node = tree.nodes[id];
  if (!node) return tree;
  const nodes = { ...tree.nodes };
  const gone = [id];
  const removed = [...(tree.removed ?? [])];
  for (let next = gone.pop(); next !== undefined; next = gone.pop()) {
    gone.push(...(nodes[next]?.children ?? []));
    removed.push(next);
    delete nodes[next];
  }
  return change({ ...tree, nodes, removed }, node.parent, (at) => {
    const index = at.children.indexOf(id);
    const active = Math.max(at.active - (at.active >= index ? 1 : 0), 0);
    return { children: at.children.filter((child) => child !== id), active };
  });
}

/** What two tabs have said in one conversation: all messages of both, with the continuation that `ours` shows. */
export function merge(ours: Tree, theirs: Tree): Tree {
  const removed = [...new Set([...(ours.removed ?? []), ...(theirs.removed ?? [])])];
  const gone = new Set(removed);
  const join = (a: Branching | undefined, b: Branching | undefined): Branching => {
    const shown = a?.children[a.active] ?? b?.children[b.active];
    const children = [...new Set([...(a?.children ?? []), ...(b?.children ?? [])])].filter((id) => !gone.has(id));
    return { children, active: Math.max(children.indexOf(shown ?? ""), 0) };
  };
  const nodes: Record<string, TreeNode> = {};
  for (const id of new Set([...Object.keys(ours.nodes), ...Object.keys(theirs.nodes)])) {
    const [a, b] = [ours.nodes[id], theirs.nodes[id]];
    if (!gone.has(id)) nodes[id] = { ...newer(a, b), ...join(a, b) };
  }
  const both: Tree = { nodes, ...join(ours, theirs), ...(removed.length ? { removed } : {}) };
  return isSame(both, ours) ? ours : both;
}

/** Whether a merged tree has nothing that `ours` has not. */
function isSame(both: Tree, ours: Tree): boolean {
  const counts = (tree: Tree) => [Object.keys(tree.nodes).length, tree.children.length, tree.removed?.length ?? 0].join();
  const known = (node: TreeNode) => ours.nodes[node.id]?.message === node.message && ours.nodes[node.id]?.children.length === node.children.length;
  return counts(both) === counts(ours) && Object.values(both.nodes).every(known);
}

/** Of two copies of a message the one that was changed more often; of two that were changed as often the one that has ended, or ours. */
function newer(ours: TreeNode | undefined, theirs: TreeNode | undefined): TreeNode {
  if (!ours || !theirs) return (ours ?? theirs)!;
  const ahead = (theirs.revision ?? 0) - (ours.revision ?? 0);
  return ahead > 0 || (ahead === 0 && isRunning(ours) && !isRunning(theirs)) ? theirs : ours;
}

function isRunning({ message }: TreeNode): boolean {
  return message.role === "assistant" && message.state === "running";
}

/** A tree of these messages alone. */
export function linear(messages: TreeNode[]): Tree {
  return messages.reduce<Tree>((tree, node, at) => append(tree, messages[at - 1]?.id ?? ROOT, node.id, node.message), EMPTY);
}

type Branching = Pick<Tree, "children" | "active">;

function parentOf(tree: Tree, id: string): Branching {
  return tree.nodes[tree.nodes[id]?.parent ?? ROOT] ?? tree;
}

function change(tree: Tree, id: string, by: (at: Branching) => Branching): Tree {
  if (id === ROOT) return { ...tree, ...by(tree) };
  const node = tree.nodes[id];
  return node ? { ...tree, nodes: { ...tree.nodes, [id]: { ...node, ...by(node) } } } : tree;
}
