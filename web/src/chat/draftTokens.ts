import { useEffect, useMemo, useState } from "react";
import { withFiles } from "../api/files";
import { countTokens } from "../api/server";
import type { Draft } from "../store/drafts";

const COUNT_AFTER_MS = 300;

/** How many tokens a draft has with its files, as the model counts; null until that is known, and where it has pictures. */
export function useDraftTokens({ text, files, pictures }: Draft, model: string | null): number | null {
  const filesText = useMemo(() => withFiles({ role: "user", text: "", files, created: 0 }), [files]);
  const written = useTokens(text, model);
  const attached = useTokens(filesText, model);
  return written === null || attached === null || pictures.length ? null : written + attached;
}

function useTokens(text: string, model: string | null): number | null {
  const [count, setCount] = useState<number | null>(0);
  useEffect(() => {
    if (!text) return setCount(0);
    const controller = new AbortController();
    const count = () => void countTokens(text, model, controller.signal).then(setCount, () => controller.signal.aborted || setCount(null));
    const timer = setTimeout(count, COUNT_AFTER_MS);
    return () => {
      clearTimeout(timer);
      controller.abort();
    };
  }, [text, model]);
  return count;
}
