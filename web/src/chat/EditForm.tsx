import { Button, Input } from "antd";
import { useState } from "react";
import { useT } from "../i18n";
import { isTouched, sends } from "./enter";

interface Props {
  text: string;
  okText: string;
  /** As where a message is written; else Enter begins a new line, and Ctrl+Enter ends the edit. */
  enterSends?: boolean;
  onOk: (text: string) => void;
  onCancel: () => void;
}

export function EditForm({ text, okText, enterSends = false, onOk, onCancel }: Props) {
  const t = useT();
  const [edited, setEdited] = useState(text);
  const press = (event: React.KeyboardEvent) => {
    const { isComposing } = event.nativeEvent;
    const pressed = { key: event.key, shiftKey: event.shiftKey, isComposing };
    if (event.key === "Escape" && !isComposing) onCancel();
    if (sends(pressed, !enterSends || isTouched()) || (event.key === "Enter" && (event.ctrlKey || event.metaKey))) {
      event.preventDefault();
      if (edited.trim()) onOk(edited);
    }
  };
  return (
    <div className="turn edit">
      <Input.TextArea
        autoFocus autoSize={{ minRows: 2, maxRows: 16 }} value={edited} dir="auto" aria-label={t("edit")}
        onChange={(event) => setEdited(event.target.value)} onKeyDown={press}
      />
      <div className="edit-buttons">
        <Button onClick={onCancel}>{t("cancel")}</Button>
        <Button type="primary" disabled={!edited.trim()} onClick={() => onOk(edited)}>{okText}</Button>
      </div>
    </div>
  );
}
