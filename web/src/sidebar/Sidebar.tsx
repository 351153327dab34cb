import { ApiOutlined, ExportOutlined, ImportOutlined, PlusOutlined, PushpinFilled, SearchOutlined } from "@ant-design/icons";
import { Conversations } from "@ant-design/x";
import { Button, Input, type InputRef } from "antd";
import { useEffect, useMemo, useRef, useState } from "react";
import { useT } from "../i18n";
import { hrefOf, useRoute, go } from "../router";
import { searchContents, type Entry } from "../store/database";
import { useConversations } from "../store/conversations";
import { useShortcuts } from "../shortcuts";
import { useEntryMenu } from "./entryMenu";
import { useTransfer } from "./transfer";
import { SideMenu } from "./SideMenu";

const DAY = 24 * 3600 * 1000;
const SEARCH_AFTER_MS = 150;

export function Sidebar({ onKey, onHelp }: { onKey: () => void; onHelp: () => void }) {
  const t = useT();
  const route = useRoute();
  const search = useRef<InputRef>(null);
  const [words, setWords] = useState("");
  const entries = useFound(words);
  const menu = useEntryMenu();
  const { exportAll, importFile } = useTransfer();
  useShortcuts({ search: () => search.current?.focus() });
  const groups: Record<string, string> = { pinned: t("pinned"), today: t("today"), week: t("week"), older: t("older") };
  const items = entries?.map((entry) => ({
    key: entry.id,
    group: groups[groupOf(entry)]!,
    label: <a href={hrefOf({ page: "chat", id: entry.id })} className="entry" dir="auto" aria-current={route.page === "chat" && route.id === entry.id ? "page" : undefined}>{entry.title || t("untitled")}</a>,
    ...(entry.pinned ? { icon: <PushpinFilled aria-hidden /> } : {}),
  }));
  return (
    <>
      <div className="side-head">
        <a href="#/" className="brand"><img src="./favicon.svg" alt="" width={24} height={24} />jaxllm</a>
        <SideMenu onKey={onKey} onHelp={onHelp} />
      </div>
      <div className="side-tools">
        <Button block type="primary" icon={<PlusOutlined aria-hidden />} href="#/">{t("newChat")}</Button>
        <Input ref={search} dir="auto" allowClear prefix={<SearchOutlined aria-hidden />} placeholder={t("searchChats")} aria-label={t("searchChats")} value={words} onChange={(event) => setWords(event.target.value)} />
      </div>
      <nav className="side-list" aria-label={t("conversations")}>
        {items?.length ? (
          <Conversations
            items={items} groupable {...(route.page === "chat" ? { activeKey: route.id } : { activeKey: "" })}
            onActiveChange={(id) => go({ page: "chat", id: String(id) })} menu={(item) => menu(entries!.find((entry) => entry.id === item.key)!)}
          />
        ) : (
          items && <p className="hint">{words ? t("nothingFound") : t("noChats")}</p>
        )}
      </nav>
      <div className="side-foot">
        <Button type="text" icon={<ApiOutlined aria-hidden />} href="#/server" aria-current={route.page === "server" ? "page" : undefined}>{t("server")}</Button>
        <span>
          <Button type="text" icon={<ImportOutlined aria-hidden />} aria-label={t("import")} title={t("import")} onClick={importFile} />
          <Button type="text" icon={<ExportOutlined aria-hidden />} aria-label={t("exportAll")} title={t("exportAll")} onClick={() => void exportAll()} />
        </span>
      </div>
    </>
  );
}

function groupOf(entry: Entry): string {
  if (entry.pinned) return "pinned";
  const midnight = new Date().setHours(0, 0, 0, 0);
  return entry.updated >= midnight ? "today" : entry.updated >= midnight - 6 * DAY ? "week" : "older";
}

/** The entries whose title or content has these words, pinned ones first, then the latest; null while they are read. */
function useFound(words: string): Entry[] | null {
  const entries = useConversations((state) => state.entries);
  const [within, setWithin] = useState<Set<string>>(new Set());
  const wanted = words.trim().toLocaleLowerCase();
  useEffect(() => {
    setWithin(new Set());
    if (!wanted) return;
    let current = true;
    const timer = setTimeout(() => void searchContents(wanted).then((found) => current && setWithin(found)), SEARCH_AFTER_MS);
    return () => {
      current = false;
      clearTimeout(timer);
    };
  }, [wanted]);
  return useMemo(() => {
    const found = entries?.filter((entry) => !wanted || entry.title.toLocaleLowerCase().includes(wanted) || within.has(entry.id));
    return found ? found.sort((a, b) => Number(b.pinned) - Number(a.pinned) || b.updated - a.updated) : null;
  }, [entries, wanted, within]);
}
