import { Button, Checkbox, Form, Input, Modal } from "antd";
import { useState } from "react";
import { storedKey, storeKey } from "./api/http";
import { listModels } from "./api/server";
import { retryRefused } from "./chat/run";
import { useT } from "./i18n";
import { loadServer } from "./serverState";

interface Props {
  open: boolean;
  onClose: () => void;
}

export function KeyDialog({ open, onClose }: Props) {
  const t = useT();
  const [key, setKey] = useState("");
  const [remember, setRemember] = useState(false);
  const [wrong, setWrong] = useState(false);
  const submit = async () => {
    storeKey(key.trim(), remember);
    try {
      await listModels();
    } catch {
      storeKey("", false);
      setWrong(true);
      return;
    }
    setWrong(false);
    setKey("");
    onClose();
    await loadServer();
    retryRefused();
  };
  const forget = () => {
    storeKey("", false);
    onClose();
    void loadServer();
  };
  return (
    <Modal
      open={open} title={t("keyTitle")} onCancel={onClose} destroyOnHidden
      footer={[
        storedKey() && <Button key="forget" danger onClick={forget}>{t("keyForget")}</Button>,
        <Button key="cancel" onClick={onClose}>{t("cancel")}</Button>,
        <Button key="ok" type="primary" disabled={!key.trim()} onClick={() => void submit()}>{t("ok")}</Button>,
      ]}
    >
      <p>{t("keyText")}</p>
      <Form layout="vertical" onFinish={() => void submit()}>
        <Form.Item label={t("key")} htmlFor="key" validateStatus={wrong ? "error" : ""} help={wrong ? t("keyWrong") : undefined}>
          <Input.Password id="key" autoFocus autoComplete="off" value={key} onChange={(event) => setKey(event.target.value)} />
        </Form.Item>
        <Checkbox checked={remember} onChange={(event) => setRemember(event.target.checked)}>{t("keyRemember")}</Checkbox>
      </Form>
    </Modal>
  );
}
