import { Modal } from "antd";
import { useT } from "./i18n";
import { SHORTCUTS } from "./shortcuts";

export function ShortcutHelp({ open, onClose }: { open: boolean; onClose: () => void }) {
  const t = useT();
  const command = /mac/i.test(navigator.platform) ? "⌘" : "Ctrl";
  return (
    <Modal open={open} title={t("shortcuts")} onCancel={onClose} footer={null}>
      <dl className="shortcuts">
        {SHORTCUTS.map(({ keys, text }) => (
          <div key={text}>
            <dt>{t(text)}</dt>
            <dd>{keys.map((key) => <kbd key={key}>{key === "Ctrl" ? command : key}</kbd>)}</dd>
          </div>
        ))}
      </dl>
    </Modal>
  );
}
