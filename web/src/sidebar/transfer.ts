import { App } from "antd";
import { useT } from "../i18n";
import { importConversations, loadConversation, newId, writeAll } from "../store/conversations";
import { readAll, type Entry } from "../store/database";
import { exportText, importText } from "../store/transfer";

export function useTransfer() {
  const t = useT();
  const { message } = App.useApp();
  const exportAll = async () => {
    await writeAll();
    download("jaxllm-conversations.json", exportText(await readAll()));
  };
  const exportOne = async (entry: Entry) => {
    const conversation = await loadConversation(entry.id);
    if (conversation) download(`${(entry.title || t("untitled")).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 50)}.json`, exportText([conversation]));
  };
  const importFile = () => {
    const input = document.createElement("input");
    input.type = "file";
    input.accept = "application/json,.json";
    input.onchange = async () => {
      try {
        const conversations = importText(await input.files![0]!.text(), newId);
        await importConversations(conversations);
        message.success(t("imported", { n: conversations.length }));
      } catch (error) {
        message.error(t("importFailed", { why: error instanceof Error ? error.message : String(error) }));
      }
    };
    input.click();
  };
  return { exportAll, exportOne, importFile };
}

function download(name: string, text: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}
