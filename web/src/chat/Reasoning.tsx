import { BulbOutlined } from "@ant-design/icons";
import { Think } from "@ant-design/x";
import { useState } from "react";
import { duration, useT } from "../i18n";
import type { ReasoningPart } from "../store/messages";
import { Markdown } from "./Markdown";

/** What the model thought, folded as soon as it has thought. */
export function Reasoning({ part }: { part: ReasoningPart }) {
  const t = useT();
  const [chosen, setChosen] = useState<boolean | null>(null);
  const thinking = part.ended === null;
  const open = chosen ?? thinking;
  const title = thinking ? t("thinking") : part.ended === 0 ? t("thoughts") : t("thoughtFor", { time: duration(part.ended! - part.started) });
  // The click reaches Think's own header, which has no keyboard.
  return (
    <Think className="reasoning" icon={<BulbOutlined aria-hidden />} loading={thinking} blink={thinking} expanded={open} onExpand={setChosen} title={<button type="button" className="bare" aria-expanded={open}>{title}</button>}>
      <Markdown text={part.text} />
    </Think>
  );
}
