import { createElement } from "react";
import { renderToStaticMarkup } from "react-dom/server";
import ReactMarkdown from "react-markdown";
import remarkGfm from "remark-gfm";
import { expect, it } from "vitest";
import { everyday } from "../src/chat/everyday";

function shown(markdown: string): string {
  return renderToStaticMarkup(createElement(ReactMarkdown, { children: markdown, remarkPlugins: [remarkGfm], rehypePlugins: [everyday] }));
}

it.each([
  ["H<sub>2</sub>O", '<p dir="auto">H<sub>2</sub>O</p>'],
  ["one<br>two<BR />three", '<p dir="auto">one<br/>two<br/>three</p>'],
  ['<kbd onclick="steal()">Esc</kbd>', '<p dir="auto"><kbd>Esc</kbd></p>'],
  ["x<sup>**2**", '<p dir="auto">x<sup><strong>2</strong></sup></p>'],
  ["</b> and <i>a <b>b</i> c</b>", '<p dir="auto">&lt;/b&gt; and <i>a <b>b</b></i> c&lt;/b&gt;</p>'],
  ["<details open>\n<summary>More</summary>\n\nA *text*\n\n</details>", '<details dir="auto">\n<summary>More</summary>\n<p>A <em>text</em></p>\n</details>'],
])("makes elements of everyday HTML: %s", (markdown, html) => expect(shown(markdown)).toBe(html));

it.each(["<script>alert(1)</script>", "List<String>", '<img src=x onerror="a()">', "<a href=javascript:a()>x</a>", "<style>b{}</style>", "<subtle>", "<!-- <script> -->", "`<br>`", "a <b"])(
  "keeps everything else as text: %s",
  (markdown) => {
    const html = shown(markdown);
    expect(html).not.toMatch(/<(?!\/?(p|code)\b)/);
    expect(html.replaceAll(/<[^>]*>/g, "").replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&quot;", '"')).toBe(markdown.replaceAll("`", ""));
  },
);

it("calls the box of a task what the task says", () => {
  const html = shown("- [x] Buy **bread**\n  - [ ] white\n- [ ] Bake\n\n  for hours");
  expect([...html.matchAll(/<input[^>]*aria-label="([^"]*)"/g)].map(([, name]) => name)).toEqual(["Buy bread", "white", "Bake"]);
});
