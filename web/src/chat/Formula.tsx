import { useEffect, useRef, useState } from "react";

type Katex = typeof import("katex").default;

let katex: Katex | null = null;
let loading: Promise<Katex> | null = null;

/** KaTeX with its fonts is loaded with the first formula. */
function load(): Promise<Katex> {
  loading ??= Promise.all([import("katex"), import("katex/dist/katex.min.css")]).then(([module]) => (katex = module.default));
  return loading;
}

export function Formula({ tex, display }: { tex: string; display: boolean }) {
  const place = useRef<HTMLSpanElement>(null);
  const [ready, setReady] = useState(katex !== null);
  useEffect(() => {
    if (!ready) void load().then(() => setReady(true));
  }, [ready]);
  useEffect(() => {
    if (katex && place.current) katex.render(tex, place.current, { displayMode: display, throwOnError: false, errorColor: "var(--error)", output: "htmlAndMathml", trust: false });
  }, [tex, display, ready]);
  return ready ? <span ref={place} dir="ltr" className={display ? "formula" : undefined} {...(display ? { tabIndex: 0 } : {})} /> : <code>{tex}</code>;
}
