import { createElement, type ReactNode } from "react";
import hljs from "highlight.js/lib/common";

const MAX_LENGTH = 100_000;

/** The code's tokens as elements: highlight.js writes nothing but text and nested spans with classes. */
export function highlighted(code: string, language: string): ReactNode {
  if (code.length > MAX_LENGTH || !hljs.getLanguage(language)) return code;
  const { value } = hljs.highlight(code, { language, ignoreIllegals: true });
  const body = new DOMParser().parseFromString(value, "text/html").body;
  return Array.from(body.childNodes, element);
}

function element(node: Node, key: number): ReactNode {
  if (!(node instanceof Element)) return node.textContent;
  return createElement("span", { key, className: node.className }, ...Array.from(node.childNodes, element));
}
