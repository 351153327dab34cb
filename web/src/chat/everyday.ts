/** Markdown's tree before it is shown: HTML of every day becomes elements, blocks get their direction, tasks their names. */

import type { Element, ElementContent, Root } from "hast";

/** What models write in Markdown, and what can do no harm without attributes. Other tags stay text. */
const NAMES = new Set(["b", "br", "del", "details", "em", "hr", "i", "ins", "kbd", "mark", "s", "small", "strong", "sub", "summary", "sup", "u"]);
const EMPTY = new Set(["br", "hr"]);
const TAG = /<(?<closing>\/?)(?<name>[a-z]+)(?:\s[^<>]*)?\/?>/gi;

export function everyday() {
  return (root: Root) => {
    root.children = nested(root.children as ElementContent[]);
    for (const node of root.children) if (node.type === "element") node.properties.dir = "auto";
    root.children.forEach((node) => nameTasks(node as ElementContent));
  };
}

/** The same nodes with elements in place of tags: their attributes are dropped, and one that nothing closes ends with its parent. */
function nested(nodes: ElementContent[]): ElementContent[] {
  const outermost: ElementContent[] = [];
  const open: Element[] = [];
  const put = (node: ElementContent) => void (open.at(-1)?.children ?? outermost).push(node);
  for (const node of nodes) {
    if (node.type === "element") node.children = nested(node.children);
    if (node.type !== "raw") {
      put(node);
      continue;
    }
    let taken = 0;
    for (const tag of node.value.matchAll(TAG)) {
      const { closing, name } = tag.groups as { closing: string; name: string };
      const tagName = name.toLowerCase();
      const opened = open.findLastIndex((element) => element.tagName === tagName);
      if (!NAMES.has(tagName) || (closing && opened < 0)) continue;
      put({ type: "text", value: node.value.slice(taken, tag.index) });
      taken = tag.index + tag[0].length;
      if (closing) open.length = opened;
      else {
        const element: Element = { type: "element", tagName, properties: {}, children: [] };
        put(element);
        if (!EMPTY.has(tagName)) open.push(element);
      }
    }
    put({ type: "text", value: node.value.slice(taken) });
  }
  return outermost;
}

/** The box of a task is called what the task says. */
function nameTasks(node: ElementContent): void {
  if (node.type !== "element") return;
  const box = node.children.find((child): child is Element => child.type === "element" && child.tagName === "input");
  if (box) box.properties.ariaLabel = node.children.map(textIn).join("").trim();
  node.children.forEach(nameTasks);
}

/** Without the lists in it, whose tasks have boxes of their own. */
function textIn(node: ElementContent): string {
  if (node.type === "text") return node.value;
  return node.type === "element" && !["ul", "ol"].includes(node.tagName) ? node.children.map(textIn).join("") : "";
}
