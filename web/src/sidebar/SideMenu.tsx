import { BulbOutlined, GlobalOutlined, KeyOutlined, MoreOutlined, QuestionCircleOutlined } from "@ant-design/icons";
import { Button, Dropdown } from "antd";
import { useT } from "../i18n";
import { LANGUAGES, type Language } from "../i18n/languages";
import { usePreferences, type Theme } from "../store/preferences";

export function SideMenu({ onKey, onHelp }: { onKey: () => void; onHelp: () => void }) {
  const t = useT();
  const { language, theme, set } = usePreferences();
  const themes: Theme[] = ["system", "light", "dark"];
  const items = [
    {
      key: "theme", icon: <BulbOutlined />, label: t("theme"),
      children: themes.map((name) => ({ key: name, label: mark(t(name), name === theme), onClick: () => set({ theme: name }) })),
    },
    {
      key: "language", icon: <GlobalOutlined />, label: t("language"),
      children: Object.entries(LANGUAGES).map(([tag, name]) => ({ key: tag, label: mark(name, tag === language), onClick: () => set({ language: tag as Language }) })),
    },
    { key: "key", icon: <KeyOutlined />, label: t("key"), onClick: onKey },
    { key: "shortcuts", icon: <QuestionCircleOutlined />, label: t("shortcuts"), onClick: onHelp },
  ];
  return (
    <Dropdown menu={{ items }} trigger={["click"]}>
      <Button type="text" icon={<MoreOutlined />} aria-label={t("menu")} title={t("menu")} />
    </Dropdown>
  );
}

function mark(label: string, chosen: boolean): string {
  return chosen ? `✓ ${label}` : label;
}
