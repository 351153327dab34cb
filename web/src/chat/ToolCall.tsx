import { CheckCircleOutlined, CloseCircleOutlined, LoadingOutlined, QuestionCircleOutlined, RightOutlined, StopOutlined, ToolOutlined } from "@ant-design/icons";
import { Button } from "antd";
import { useState, type ReactNode } from "react";
import { useT } from "../i18n";
import type { CallPart, CallState } from "../store/messages";
import { CodeBlock } from "./CodeBlock";
import { approve } from "./run";

const STATES: Record<CallState, { icon: ReactNode; text: "callWriting" | "calling" | "callAsking" | "callApproved" | "callDenied" | "callDone" | "callFailed" | "callStopped" }> = {
  writing: { icon: <LoadingOutlined aria-hidden />, text: "callWriting" },
  running: { icon: <LoadingOutlined aria-hidden />, text: "calling" },
  asking: { icon: <QuestionCircleOutlined aria-hidden />, text: "callAsking" },
  approved: { icon: <LoadingOutlined aria-hidden />, text: "callApproved" },
  denied: { icon: <StopOutlined aria-hidden />, text: "callDenied" },
  done: { icon: <CheckCircleOutlined aria-hidden />, text: "callDone" },
  failed: { icon: <CloseCircleOutlined aria-hidden />, text: "callFailed" },
  stopped: { icon: <StopOutlined aria-hidden />, text: "callStopped" },
};

interface Props {
  part: CallPart;
  conversationId: string;
  messageId: string;
}

export function ToolCall({ part, conversationId, messageId }: Props) {
  const t = useT();
  const [chosen, setChosen] = useState<boolean | null>(null);
  const asking = part.state === "asking";
  const open = chosen ?? asking;
  const { icon, text } = STATES[part.state];
  const name = t("toolCall", { server: part.server, name: part.name });
  const result = part.error ? errorText(part.error) : part.output;
  return (
    <section className={`call ${part.state}`} aria-label={name}>
      <button type="button" className="bare call-head" aria-expanded={open} onClick={() => setChosen(!open)}>
        <ToolOutlined aria-hidden /><strong>{name}</strong>
        <span className="call-state">{icon} {t(text)}</span>
        <RightOutlined aria-hidden rotate={open ? 90 : 0} />
      </button>
      {open && (
        <div className="call-body">
          <div className="label">{t("arguments")}</div>
          <CodeBlock code={pretty(part.arguments) || "{}"} language="json" />
          {result !== null && <><div className="label">{t("result")}</div><CodeBlock code={pretty(result)} language={isJSON(result) ? "json" : ""} /></>}
        </div>
      )}
      {asking && (
        <div className="call-ask">
          <span>{t("allowQuestion")}</span>
          <Button onClick={() => approve(conversationId, messageId, part.id, false)}>{t("deny")}</Button>
          <Button type="primary" onClick={() => approve(conversationId, messageId, part.id, true)}>{t("allow")}</Button>
        </div>
      )}
    </section>
  );
}

/** An object or a list with line breaks; what is neither, as 42.0, or not all of it yet, as it is. */
function pretty(text: string): string {
  if (!isJSON(text)) return text;
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function isJSON(text: string): boolean {
  return /^\s*[[{]/.test(text);
}

/** OpenAI's errors have the text of the server in `content` or `message`. */
function errorText(error: unknown): string {
  if (typeof error === "string") return error;
  const { content, message } = error as { content?: unknown; message?: unknown };
  if (typeof message === "string") return message;
  return Array.isArray(content) ? content.map((part: { text?: string }) => part.text ?? "").join("\n") : JSON.stringify(error);
}
