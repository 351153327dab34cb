import { MenuFoldOutlined, MenuUnfoldOutlined, SettingOutlined } from "@ant-design/icons";
import { Alert, Button, Spin } from "antd";
import { useEffect, useState } from "react";
import { useT } from "../i18n";
import { go } from "../router";
import { modelOf, useServer } from "../serverState";
import { change, createConversation, loadConversation, useConversations } from "../store/conversations";
import type { Conversation } from "../store/database";
import { changeDraft, forgetDraft, useDraft } from "../store/drafts";
import { contextUsed } from "../store/messages";
import { usePreferences } from "../store/preferences";
import { path } from "../store/tree";
import type { Settings } from "../settings/fields";
import { SettingsDrawer } from "../settings/SettingsDrawer";
import { useShortcuts } from "../shortcuts";
import { Composer } from "./Composer";
import { ContextGauge } from "./ContextGauge";
import { useDraftTokens } from "./draftTokens";
import { MessageList } from "./MessageList";
import { ModelLoading } from "./ModelLoading";
import { ModelSelect } from "./ModelSelect";
import { say, stop, useRuns } from "./run";
import { Start } from "./Start";

interface Props {
  /** Null: a conversation that begins with its first message. */
  id: string | null;
  listOpen: boolean;
  onToggleList: () => void;
}

export function ChatPage({ id, listOpen, onToggleList }: Props) {
  const t = useT();
  const conversation = useConversations((state) => (id === null ? undefined : state.loaded[id]));
  const gone = useLoading(id);
  const problem = useConversations((state) => state.problem);
  const reachable = useServer((state) => state.reachable);
  const loading = useServer((state) => state.loading);
  const models = useServer((state) => state.models);
  const [asksSettings, setAsksSettings] = useState(false);
  const draft = useDraft(id);
  const { settings, setSettings } = useSettings(conversation);
  const drafted = useDraftTokens(draft, settings.model);
  useShortcuts({ stop: () => id !== null && stop(id), settings: () => setAsksSettings(true) });
  useEffect(() => {
    document.title = conversation?.title ? `${conversation.title} · jaxllm` : "jaxllm";
  }, [conversation?.title]);

  const send = () => {
    const at = conversation ?? createConversation(settings);
    forgetDraft(id);
    say(at.id, draft);
    if (!conversation) go({ page: "chat", id: at.id });
  };
  const shown = conversation ? path(conversation.tree) : [];
  const running = useRuns((runs) => id !== null && id in runs);
  return (
    <main className="chat">
      <header className="bar">
        <Button type="text" icon={listOpen ? <MenuFoldOutlined aria-hidden /> : <MenuUnfoldOutlined aria-hidden />} onClick={onToggleList} aria-expanded={listOpen} aria-label={t(listOpen ? "closeList" : "openList")} />
        <ModelSelect settings={settings} onChange={setSettings} />
        <h1 className="bar-title" dir="auto">{conversation?.title || t("newChat")}</h1>
        <ContextGauge said={contextUsed(shown.map(({ message }) => message))} drafted={drafted ?? 0} model={settings.model} />
        <Button type="text" icon={<SettingOutlined aria-hidden />} onClick={() => setAsksSettings(true)} aria-label={t("settings")} title={t("settings")} />
      </header>
      {loading !== null && <Alert banner type="info" title={t("loadingModel")} description={loading.total ? `${loading.doing}: ${loading.done} / ${loading.total}` : loading.doing} />}
      <ModelLoading model={modelOf(models, settings.model)} />
      {reachable === false && <Alert banner type="error" title={`${t("unreachable")} ${t("askedAgain")}`} />}
      {problem !== null && <Alert banner type="warning" title={t("notKept", { why: problem })} />}
      {gone ? (
        <div className="middle"><p>{t("gone")}</p><Button href="#/">{t("newChat")}</Button></div>
      ) : id !== null && !conversation ? (
        <div className="middle"><Spin /></div>
      ) : shown.length && conversation ? (
        <MessageList key={`list-${conversation.id}`} conversation={conversation} running={running} />
      ) : (
        <Start model={settings.model} onChoose={(text) => changeDraft(id, () => ({ text }))} />
      )}
      {!gone && <Composer key={`composer-${id}`} draft={draft} tokens={drafted} settings={settings} onSettings={setSettings} running={running} shown={shown} id={id} onSend={send} />}
      <SettingsDrawer open={asksSettings} onClose={() => setAsksSettings(false)} settings={settings} onChange={setSettings} />
    </main>
  );
}

/** Load a conversation; true when there is none of this id. */
function useLoading(id: string | null): boolean {
  const [missing, setMissing] = useState<string | null>(null);
  useEffect(() => {
    let current = true;
    if (id !== null) void loadConversation(id).then((found) => current && setMissing(found ? null : id));
    return () => {
      current = false;
    };
  }, [id]);
  return id !== null && missing === id;
}

/** The settings of a conversation; those of one that has not begun are kept until it does. */
function useSettings(conversation: Conversation | undefined) {
  const standard = usePreferences((preferences) => preferences.settings);
  const [own, setOwn] = useState<Settings | null>(null);
  const setSettings = (settings: Settings) => {
    if (conversation) change(conversation.id, (at) => ({ ...at, settings }));
    else setOwn(settings);
  };
  useEffect(() => {
    if (conversation) setOwn(null);
  }, [conversation]);
  return { settings: conversation?.settings ?? own ?? standard, setSettings };
}
