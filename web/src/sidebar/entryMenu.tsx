import { CopyOutlined, DeleteOutlined, EditOutlined, EllipsisOutlined, ExportOutlined, FileMarkdownOutlined, PushpinOutlined } from "@ant-design/icons";
import { App, Button, Input } from "antd";
import { stop } from "../chat/run";
import { useT } from "../i18n";
import { inSide } from "../popups";
import { go, hrefOf } from "../router";
import { changeEntry, removeConversation } from "../store/conversations";
import type { Entry } from "../store/database";
import { forgetDraft } from "../store/drafts";
import { useTransfer } from "./transfer";

/** What can be done with a conversation of the list. */
export function useEntryMenu() {
  const t = useT();
  const { modal } = App.useApp();
  const { exportOne, exportMarkdown, copyMarkdown } = useTransfer();
  const rename = (entry: Entry) => {
    let title = entry.title;
    const save = () => changeEntry(entry.id, { title: title.trim() || entry.title });
    const dialog = modal.confirm({
      title: t("rename"), icon: null, okText: t("save"), cancelText: t("cancel"), autoFocusButton: null,
      content: <Input autoFocus dir="auto" aria-label={t("rename")} defaultValue={title} onChange={(event) => (title = event.target.value)} onPressEnter={(event) => {
        if (event.nativeEvent.isComposing) return;
        void save();
        dialog.destroy();
      }} />,
      onOk: save,
    });
  };
  const remove = (entry: Entry) =>
    void modal.confirm({
      title: t("deleteTitle"), content: t("deleteText", { name: entry.title || t("untitled") }), okText: t("delete"), cancelText: t("cancel"), okButtonProps: { danger: true },
      onOk: async () => {
        stop(entry.id);
        if (location.hash === hrefOf({ page: "chat", id: entry.id })) go({ page: "new" });
        forgetDraft(entry.id);
        await removeConversation(entry.id);
      },
    });
  return (entry: Entry) => ({
    trigger: () => <Button type="text" size="small" className="entry-menu" icon={<EllipsisOutlined aria-hidden />} aria-label={t("moreFor", { name: entry.title || t("untitled") })} />,
    getPopupContainer: inSide,
    items: [
      { key: "rename", icon: <EditOutlined aria-hidden />, label: t("rename"), onClick: () => rename(entry) },
      { key: "pin", icon: <PushpinOutlined aria-hidden />, label: entry.pinned ? t("unpin") : t("pin"), onClick: () => void changeEntry(entry.id, { pinned: !entry.pinned }) },
      { key: "export", icon: <ExportOutlined aria-hidden />, label: t("export"), onClick: () => void exportOne(entry) },
      { key: "exportMarkdown", icon: <FileMarkdownOutlined aria-hidden />, label: t("exportMarkdown"), onClick: () => void exportMarkdown(entry) },
      { key: "copyMarkdown", icon: <CopyOutlined aria-hidden />, label: t("copyMarkdown"), onClick: () => void copyMarkdown(entry) },
      { key: "delete", icon: <DeleteOutlined aria-hidden />, label: t("delete"), danger: true, onClick: () => remove(entry) },
    ],
  });
}
