import { Drawer, Grid } from "antd";
import { useEffect, useState } from "react";
import { whenUnauthorized } from "./api/http";
import { ChatPage } from "./chat/ChatPage";
import { KeyDialog } from "./KeyDialog";
import { go, useRoute } from "./router";
import { loadServer } from "./serverState";
import { ServerPage } from "./server/ServerPage";
import { ShortcutHelp } from "./ShortcutHelp";
import { Sidebar } from "./sidebar/Sidebar";
import { useT } from "./i18n";
import { useShortcuts } from "./shortcuts";

export function Shell() {
  const t = useT();
  const route = useRoute();
  const wide = Grid.useBreakpoint().md ?? true;
  const [asksKey, setAsksKey] = useState(false);
  const [helps, setHelps] = useState(false);
  const [listed, setListed] = useState(false);
  const [collapsed, setCollapsed] = useState(false);
  useEffect(() => {
    whenUnauthorized(() => setAsksKey(true));
    void loadServer();
  }, []);
  useShortcuts({ help: () => setHelps(true), new: () => go({ page: "new" }) });
  useEffect(() => setListed(false), [route.page, route.page === "chat" ? route.id : ""]);
  const sidebar = <Sidebar onKey={() => setAsksKey(true)} onHelp={() => setHelps(true)} />;
  const open = wide ? !collapsed : listed;
  const toggle = () => (wide ? setCollapsed(!collapsed) : setListed(!listed));
  return (
    <div className="shell">
      {wide ? (
        !collapsed && <aside className="side" aria-label={t("conversations")}>{sidebar}</aside>
      ) : (
        <Drawer open={listed} onClose={() => setListed(false)} placement="left" size={300} closable={false} aria-label={t("conversations")} styles={{ body: { padding: 0 } }}>
          <div className="side">{sidebar}</div>
        </Drawer>
      )}
      {route.page === "server" ? (
        <ServerPage listOpen={open} onToggleList={toggle} />
      ) : (
        <ChatPage id={route.page === "chat" ? route.id : null} listOpen={open} onToggleList={toggle} />
      )}
      <KeyDialog open={asksKey} onClose={() => setAsksKey(false)} />
      <ShortcutHelp open={helps} onClose={() => setHelps(false)} />
    </div>
  );
}
