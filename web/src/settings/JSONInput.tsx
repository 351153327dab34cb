import { Input } from "antd";
import { useState } from "react";
import { useT } from "../i18n";

/** JSON as text; what is none is said to be none. */
export function JSONInput({ id, text, onText }: { id: string; text: string; onText: (text: string) => void }) {
  const t = useT();
  const [typed, setTyped] = useState(text);
  const wrong = typed.trim() !== "" && !isJSON(typed);
  const change = (next: string) => {
    setTyped(next);
    onText(next);
  };
  return (
    <>
      <Input.TextArea
        id={id} className="mono" autoSize={{ minRows: 2, maxRows: 14 }} spellCheck={false} placeholder="{}" value={typed} onChange={(event) => change(event.target.value)}
        status={wrong ? "error" : ""} aria-invalid={wrong} {...(wrong ? { "aria-describedby": `${id}-problem` } : {})}
      />
      {wrong && <span id={`${id}-problem`} className="bad" role="alert">{t("notJSON")}</span>}
    </>
  );
}

function isJSON(text: string): boolean {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}
