/** What was said in the last moments before the page was closed: writing it into the database may take longer than the page has left. */

import { restore, settled, type Conversation } from "./database";
import type { Tree, TreeNode } from "./tree";

const PREFIX = "jaxllm.unwritten.";

/** Keep what each conversation has that its written copy, if there is one, has not. It is done when this returns. */
export function keep(changed: { now: Conversation; written: Conversation | undefined }[]): void {
  for (const { now, written } of changed) {
    try {
      localStorage.setItem(PREFIX + now.id, JSON.stringify({ ...now, tree: settled(difference(now.tree, written?.tree)) }));
    } catch (error) {
      if (!(error instanceof DOMException)) throw error; // it is full; the database may still be in time, and nobody is left to be told
    }
  }
}

/** Put what was kept into the database. */
export async function recover(): Promise<void> {
  for (const key of Object.keys(localStorage).filter((name) => name.startsWith(PREFIX))) {
    await restore(JSON.parse(localStorage.getItem(key)!) as Conversation);
    localStorage.removeItem(key);
  }
}

function difference(now: Tree, written: Tree | undefined): Tree {
  const changed = Object.values(now.nodes).filter((node) => written?.nodes[node.id] !== node);
  return { ...now, nodes: Object.fromEntries(changed.map((node) => [node.id, written?.nodes[node.id]?.message === node.message ? bare(node) : node])) };
}

/** The same without its pictures, for which there may be no room: older than any other copy, whose message is taken. */
function bare(node: TreeNode): TreeNode {
  if (node.message.role !== "user" || !node.message.pictures?.length) return node;
  return { ...node, message: { ...node.message, pictures: [] }, revision: -1 };
}
