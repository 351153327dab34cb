import { Button, Input } from "antd";
import { useState } from "react";
import { useT } from "../i18n";

interface Props {
  text: string;
  okText: string;
  onOk: (text: string) => void;
  onCancel: () => void;
}

export function EditForm({ text, okText, onOk, onCancel }: Props) {
  const t = useT();
  const [edited, setEdited] = useState(text);
  return (
    <div className="turn edit">
      <Input.TextArea
        autoFocus autoSize={{ minRows: 2, maxRows: 16 }} value={edited} aria-label={t("edit")} onChange={(event) => setEdited(event.target.value)}
        onKeyDown={(event) => {
          if (event.key === "Escape") onCancel();
          if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) onOk(edited);
        }}
      />
      <div className="edit-buttons">
        <Button onClick={onCancel}>{t("cancel")}</Button>
        <Button type="primary" disabled={!edited.trim()} onClick={() => onOk(edited)}>{okText}</Button>
      </div>
    </div>
  );
}
