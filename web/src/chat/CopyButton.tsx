import { CheckOutlined, CopyOutlined } from "@ant-design/icons";
import { Button } from "antd";
import { useState } from "react";
import { copyText } from "../clipboard";
import { useT } from "../i18n";

const SHOWN_MS = 1500;

export function CopyButton({ text, label }: { text: string; label?: string }) {
  const t = useT();
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    await copyText(text);
    setCopied(true);
    setTimeout(() => setCopied(false), SHOWN_MS);
  };
  const name = copied ? t("copied") : (label ?? t("copy"));
  return <Button type="text" size="small" icon={copied ? <CheckOutlined aria-hidden /> : <CopyOutlined aria-hidden />} aria-label={name} title={name} onClick={() => void copy()} />;
}
