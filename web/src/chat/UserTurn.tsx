import { EditOutlined, FileTextOutlined } from "@ant-design/icons";
import { Bubble } from "@ant-design/x";
import { Button, Tag } from "antd";
import { memo, useState } from "react";
import { useT } from "../i18n";
import type { UserMessage } from "../store/messages";
import { CopyButton } from "./CopyButton";
import { EditForm } from "./EditForm";
import { PictureList } from "./Pictures";
import { editUser } from "./run";
import { VersionSwitch } from "./VersionSwitch";

export interface TurnProps {
  conversationId: string;
  id: string;
  /** Which of how many alternatives it is. */
  index: number;
  count: number;
  /** An answer of the conversation is under way. */
  busy: boolean;
}

export const UserTurn = memo(function UserTurn({ conversationId, id, index, count, busy, message }: TurnProps & { message: UserMessage }) {
  const t = useT();
  const [editing, setEditing] = useState(false);
  if (editing) {
    const send = (text: string) => {
      setEditing(false);
      editUser(conversationId, id, text);
    };
    return (
      <>
        <PictureList pictures={message.pictures ?? []} />
        <EditForm text={message.text} okText={t("sendEdited")} onOk={send} enterSends onCancel={() => setEditing(false)} />
      </>
    );
  }
  return (
    <article className="turn user" aria-label={t("you")}>
      <PictureList pictures={message.pictures ?? []} />
      {message.files.length > 0 && (
        <div className="files">{message.files.map((file, at) => <Tag key={at} icon={<FileTextOutlined aria-hidden />}><bdi>{file.name}</bdi></Tag>)}</div>
      )}
      {message.text && <Bubble placement="end" variant="filled" content={<div className="said" dir="auto">{message.text}</div>} />}
      <div className="actions" role="toolbar" aria-label={t("you")}>
        <VersionSwitch conversationId={conversationId} id={id} index={index} count={count} disabled={busy} />
        <CopyButton text={message.text} />
        <Button type="text" size="small" icon={<EditOutlined aria-hidden />} disabled={busy} data-edit aria-label={t("edit")} title={t("edit")} onClick={() => setEditing(true)} />
      </div>
    </article>
  );
});
