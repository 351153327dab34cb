import { BranchesOutlined, DeleteOutlined, EditOutlined, FontColorsOutlined, ForwardOutlined, ReloadOutlined } from "@ant-design/icons";
import { Alert, App, Button } from "antd";
import { memo, useState } from "react";
import { useT } from "../i18n";
import { go } from "../router";
import { changeTree, fork, useConversations } from "../store/conversations";
import { canContinue, textOf, type AssistantMessage, type Part } from "../store/messages";
import { lineage, read, remove } from "../store/tree";
import { AnswerStats } from "./AnswerStats";
import { CopyButton } from "./CopyButton";
import { EditForm } from "./EditForm";
import { continueElsewhere, leaveOut, nextFrom } from "./full";
import { Markdown } from "./Markdown";
import { Reasoning } from "./Reasoning";
import { continueAnswer, editAnswer, regenerate } from "./run";
import { TokenText } from "./TokenText";
import { ToolCall } from "./ToolCall";
import type { TurnProps } from "./UserTurn";
import { VersionSwitch } from "./VersionSwitch";

type Props = TurnProps & { message: AssistantMessage; last: boolean };

export const Answer = memo(function Answer({ conversationId, id, index, count, busy, last, message }: Props) {
  const t = useT();
  const [editing, setEditing] = useState(false);
  const [asTokens, setAsTokens] = useState(false);
  const running = message.state === "running";
  const hasTokens = message.parts.some((part) => part.kind === "text" && part.tokens.length > 0);
  const text = textOf(message);
  if (editing) {
    const save = (edited: string) => {
      setEditing(false);
      editAnswer(conversationId, id, edited);
    };
    return <EditForm text={text} okText={t("saveAsVersion")} onOk={save} onCancel={() => setEditing(false)} />;
  }
  const forkHere = () => {
    const conversation = useConversations.getState().loaded[conversationId];
    if (conversation) go({ page: "chat", id: fork(conversation, id).id });
  };
  const goOn = () => (canContinue(message) ? continueAnswer : regenerate)(conversationId, id);
  const button = (icon: React.ReactNode, name: string, onClick: () => void, extra: { "aria-pressed"?: boolean; disabled?: boolean } = {}) => (
    <Button type="text" size="small" icon={icon} aria-label={name} title={name} onClick={onClick} disabled={busy} {...extra} />
  );
  const partOf = (part: Part, at: number) => {
    switch (part.kind) {
      case "reasoning":
        return <Reasoning key={at} part={part} />;
      case "call":
        return <ToolCall key={at} part={part} conversationId={conversationId} messageId={id} />;
      case "tools":
        return part.error !== null && <Alert key={at} type="warning" showIcon title={t("listFailed", { server: part.server, why: part.error })} />;
      case "text":
        return asTokens && part.tokens.length ? <TokenText key={at} tokens={part.tokens} /> : <Markdown key={at} text={part.text} />;
    }
  };
  return (
    <article className="turn answer" aria-label={t("assistant")} aria-busy={running}>
      {message.parts.map(partOf)}
      {running && message.parts.length === 0 && message.error === null && <p className="waiting"><span className="dots" aria-hidden />{t("waiting")}</p>}
      {message.error !== null && running && <Alert type="warning" showIcon title={message.error} />}
      {message.error !== null && !running && (
        <Alert
          type="error" showIcon title={t("failed", { why: message.error })} description={last && message.full && <WaysOut conversationId={conversationId} id={id} busy={busy} goOn={goOn} />}
          action={last ? <Button size="small" onClick={() => regenerate(conversationId, id)}>{t("retry")}</Button> : undefined}
        />
      )}
      <div className="answer-foot">
        {!running && (
          <div className="actions" role="toolbar" aria-label={t("assistant")}>
            <VersionSwitch conversationId={conversationId} id={id} index={index} count={count} disabled={busy} />
            <CopyButton text={text} />
            {last && canContinue(message) && button(<ForwardOutlined aria-hidden />, t("continue"), () => continueAnswer(conversationId, id))}
            {button(<ReloadOutlined aria-hidden />, t("regenerate"), () => regenerate(conversationId, id))}
            {button(<EditOutlined aria-hidden />, t("edit"), () => setEditing(true))}
            {button(<BranchesOutlined aria-hidden />, t("fork"), forkHere)}
            {hasTokens && button(<FontColorsOutlined aria-hidden />, t(asTokens ? "showText" : "showTokens"), () => setAsTokens(!asTokens), { "aria-pressed": asTokens, disabled: false })}
            {button(<DeleteOutlined aria-hidden />, t("deleteMessage"), () => changeTree(conversationId, (tree) => remove(tree, id)))}
          </div>
        )}
        <AnswerStats message={message} />
      </div>
    </article>
  );
});

/** Out of a conversation that the context does not hold: without its oldest turns, or with a summary of it. */
function WaysOut({ conversationId, id, busy, goOn }: Pick<TurnProps, "conversationId" | "id" | "busy"> & { goOn: () => void }) {
  const t = useT();
  const { message } = App.useApp();
  const [waits, setWaits] = useState(false);
  const turns = useConversations((state) => state.loaded[conversationId]?.tree);
  if (!turns || nextFrom(read(lineage(turns, id))) === null) return null;
  const shorter = () => {
    leaveOut(conversationId, id);
    goOn();
  };
  const summarize = () => {
    setWaits(true);
    const tell = (error: unknown) => void message.error(t("failed", { why: error instanceof Error ? error.message : String(error) }));
    void continueElsewhere(conversationId, id).then((fresh) => go({ page: "chat", id: fresh }), tell).finally(() => setWaits(false));
  };
  return (
    <span className="ways-out">
      <Button size="small" disabled={busy || waits} onClick={shorter}>{t("leaveOut")}</Button>
      <Button size="small" disabled={busy} loading={waits} onClick={summarize}>{t("summarize")}</Button>
    </span>
  );
}
