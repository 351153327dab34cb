import { App } from "antd";
import { copyText } from "../clipboard";
import { useT } from "../i18n";
import { importConversations, loadConversation, newId, writeAll } from "../store/conversations";
import { readAll, type Entry } from "../store/database";
import { markdownOf } from "../store/markdown";
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
    if (conversation) download(`${fileName(entry)}.json`, exportText([conversation]));
  };
  const fileName = (entry: Entry) => (entry.title || t("untitled")).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 50);
  const asMarkdown = async (entry: Entry, pictures: "inside" | "named") => {
    const conversation = await loadConversation(entry.id);
    return conversation && markdownOf(conversation, { you: t("you"), assistant: t("assistant"), untitled: t("untitled") }, pictures);
  };
  const exportMarkdown = async (entry: Entry) => {
    const text = await asMarkdown(entry, "inside");
    if (text !== null) download(`${fileName(entry)}.md`, text, "text/markdown");
  };
  const copyMarkdown = async (entry: Entry) => {
    const text = await asMarkdown(entry, "named");
    if (text === null) return;
    await copyText(text);
    message.success(t("copied"));
  };
  const importFile = () => {
    const input = document.createElement("input");
    input.type = "file";
    input.accept = "application/json,.json";
    input.multiple = true; // ChatGPT's exports of many conversations are several files
    input.onchange = async () => {
      try {
        const texts = await Promise.all(Array.from(input.files!, (file) => file.text()));
        const conversations = texts.flatMap((text) => importText(text, newId));
        await importConversations(conversations);
        message.success(t("imported", { n: conversations.length }));
      } catch (error) {
        message.error(t("importFailed", { why: error instanceof Error ? error.message : String(error) }));
      }
    };
    input.click();
  };
  return { exportAll, exportOne, exportMarkdown, copyMarkdown, importFile };
}

function download(name: string, text: string, type = "application/json"): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}
