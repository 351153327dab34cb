import { memo, useEffect, useState, type ReactNode } from "react";
import { useT } from "../i18n";
import { CopyButton } from "./CopyButton";

type Highlighter = typeof import("./highlight");

let highlighter: Highlighter | null = null;

/** Code with its language's name and a button that copies it; the highlighter is loaded with the first one. */
export const CodeBlock = memo(function CodeBlock({ code, language }: { code: string; language: string }) {
  const t = useT();
  const [ready, setReady] = useState(highlighter !== null);
  useEffect(() => {
    if (!ready) void import("./highlight").then((module) => setReady(Boolean((highlighter = module))));
  }, [ready]);
  const shown: ReactNode = highlighter && ready ? highlighter.highlighted(code, language) : code;
  return (
    <div className="code" dir="ltr">
      <div className="code-head"><span>{language}</span><CopyButton text={code} label={t("copyCode")} /></div>
      <pre tabIndex={0} dir={language ? "ltr" : "auto"}><code className="hljs">{shown}</code></pre>
    </div>
  );
});
