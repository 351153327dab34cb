import { memo } from "react";
import ReactMarkdown, { type Components, type Options } from "react-markdown";
import remarkGfm from "remark-gfm";
import remarkMath from "remark-math";
import { useT } from "../i18n";
import { CodeBlock } from "./CodeBlock";
import { everyday } from "./everyday";
import { Formula } from "./Formula";
import { markFormulas } from "./formulas";

const PLUGINS: Options["remarkPlugins"] = [remarkGfm, [remarkMath, { singleDollarTextMath: false }]];
const TREE_PLUGINS: Options["rehypePlugins"] = [everyday];

const COMPONENTS: Components = {
  pre: ({ children }) => <>{children}</>,
  code({ className, children }) {
    const text = String(children ?? "").replace(/\n$/, "");
    if (className?.includes("math-display")) return <Formula tex={text} display />;
    if (className?.includes("math-inline")) return <Formula tex={text} display={false} />;
    const language = /language-(\S+)/.exec(className ?? "")?.[1];
    const block = language !== undefined || String(children ?? "").endsWith("\n");
    return block ? <CodeBlock code={text} language={language ?? ""} /> : <code dir="ltr">{children}</code>;
  },
  a: ({ href, children }) => <a href={href} target="_blank" rel="noopener noreferrer nofollow">{children}</a>,
  table: ({ dir, children }) => <div className="table" dir={dir} tabIndex={0}><table>{children}</table></div>,
  img: ({ src, alt }) => <ImageLink src={typeof src === "string" ? src : ""} alt={alt ?? ""} />,
};

/** A picture from elsewhere would tell its server who reads this: it is a link. */
function ImageLink({ src, alt }: { src: string; alt: string }) {
  const t = useT();
  return <a href={src} target="_blank" rel="noopener noreferrer nofollow">{t("image", { name: alt || src })}</a>;
}

/** Markdown with tables, code, formulas and HTML of every day; other HTML is shown as text. */
export const Markdown = memo(function Markdown({ text }: { text: string }) {
  return (
    <div className="markdown" dir="auto">
      <ReactMarkdown remarkPlugins={PLUGINS} rehypePlugins={TREE_PLUGINS} components={COMPONENTS}>{markFormulas(text)}</ReactMarkdown>
    </div>
  );
});
