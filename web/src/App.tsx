import { XProvider } from "@ant-design/x";
import enX from "@ant-design/x/locale/en_US";
import zhX from "@ant-design/x/locale/zh_CN";
import { App as AntApp } from "antd";
import deDE from "antd/locale/de_DE";
import enUS from "antd/locale/en_US";
import zhCN from "antd/locale/zh_CN";
import { useEffect } from "react";
import { takeIn } from "./chat/run";
import { deX } from "./i18n/antd";
import type { Language } from "./i18n/languages";
import { Shell } from "./Shell";
import { keepUnwritten, loadEntries, writeAll } from "./store/conversations";
import { usePreferences } from "./store/preferences";
import { themeConfig, ThemeVariables, useDark } from "./theme";

const LOCALES = { en: { ...enUS, ...enX }, zh: { ...zhCN, ...zhX }, de: { ...deDE, ...deX } };
const TAGS: Record<Language, string> = { en: "en", zh: "zh-Hans", de: "de" };

export function App() {
  const dark = useDark();
  const language = usePreferences((preferences) => preferences.language);
  useEffect(() => {
    document.documentElement.lang = TAGS[language];
  }, [language]);
  useEffect(() => {
    void loadEntries();
    const write = () => {
      takeIn();
      keepUnwritten();
      void writeAll();
    };
    addEventListener("pagehide", write);
    return () => removeEventListener("pagehide", write);
  }, []);
  return (
    <XProvider theme={themeConfig(dark)} locale={LOCALES[language]}>
      <ThemeVariables dark={dark} />
      <AntApp className="app">
        <Shell />
      </AntApp>
    </XProvider>
  );
}
