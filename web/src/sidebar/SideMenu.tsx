import { BulbOutlined, DeleteOutlined, FontSizeOutlined, GlobalOutlined, KeyOutlined, MoreOutlined, QuestionCircleOutlined } from "@ant-design/icons";
import { App, Button, Dropdown } from "antd";
import { stopAll } from "../chat/run";
import { useT } from "../i18n";
import { LANGUAGES, type Language } from "../i18n/languages";
import { inSide } from "../popups";
import { go } from "../router";
import { removeAll, useConversations } from "../store/conversations";
import { usePreferences, type Theme } from "../store/preferences";

export function SideMenu({ onKey, onHelp }: { onKey: () => void; onHelp: () => void }) {
  const t = useT();
  const { language, theme, titles, set } = usePreferences();
  const { modal } = App.useApp();
  const count = useConversations((state) => state.entries?.length ?? 0);
  const deleteAll = () =>
    void modal.confirm({
      title: t("deleteAllTitle"), content: t("deleteAllText", { n: count }), okText: t("delete"), cancelText: t("cancel"), okButtonProps: { danger: true },
      onOk: async () => {
        stopAll();
        go({ page: "new" });
        await removeAll();
      },
    });
  const themes: Theme[] = ["system", "light", "dark"];
  const items = [
    {
      key: "theme", icon: <BulbOutlined aria-hidden />, label: t("theme"),
      children: themes.map((name) => ({ key: name, label: mark(t(name), name === theme), onClick: () => set({ theme: name }) })),
    },
    {
      key: "language", icon: <GlobalOutlined aria-hidden />, label: t("language"),
      children: Object.entries(LANGUAGES).map(([tag, name]) => ({ key: tag, label: mark(name, tag === language), onClick: () => set({ language: tag as Language }) })),
    },
    {
      key: "titles", icon: <FontSizeOutlined aria-hidden />, label: t("titles"),
      children: [["words", t("titleWords")] as const, ["model", t("titleModel")] as const].map(([name, label]) => ({ key: name, label: mark(label, name === titles), onClick: () => set({ titles: name }) })),
    },
    { key: "key", icon: <KeyOutlined aria-hidden />, label: t("key"), onClick: onKey },
    { key: "shortcuts", icon: <QuestionCircleOutlined aria-hidden />, label: t("shortcuts"), onClick: onHelp },
    { key: "deleteAll", icon: <DeleteOutlined aria-hidden />, label: t("deleteAll"), danger: true, disabled: count === 0, onClick: deleteAll },
  ];
  return (
    <Dropdown menu={{ items }} trigger={["click"]} getPopupContainer={inSide}>
      <Button type="text" icon={<MoreOutlined aria-hidden />} aria-label={t("menu")} title={t("menu")} />
    </Dropdown>
  );
}

function mark(label: string, chosen: boolean): string {
  return chosen ? `✓ ${label}` : label;
}
