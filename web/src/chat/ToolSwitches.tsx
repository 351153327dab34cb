import { ToolOutlined } from "@ant-design/icons";
import { Button, Popover, Select, Switch, Tooltip } from "antd";
import { useEffect, useState } from "react";
import { useT } from "../i18n";
import { inMain } from "../popups";
import { refreshToolServers, useServer } from "../serverState";
import type { ToolServer } from "../api/server";
import type { Approval, Settings, ToolChoice } from "../settings/fields";

const REFRESH_MS = 2000;

const APPROVALS: Approval[] = ["always", "writes", "never"];

interface Props {
  settings: Settings;
  onChange: (settings: Settings) => void;
}

/** The server's MCP servers, switched on and off for this conversation; nothing where it has none. */
export function ToolSwitches({ settings, onChange }: Props) {
  const t = useT();
  const servers = useServer((state) => state.toolServers);
  const [open, setOpen] = useState(false);
  useEffect(() => {
    if (!open) return;
    void refreshToolServers();
    const timer = setInterval(() => void refreshToolServers(), REFRESH_MS);
    return () => clearInterval(timer);
  }, [open]);
  if (!servers.length) return null;
  const on = servers.filter((server) => server.label in settings.servers).length;
  const content = (
    <>
      <ul className="tool-servers">{servers.map((server) => <li key={server.label}><OneServer server={server} settings={settings} onChange={onChange} /></li>)}</ul>
      {on > 0 && <ChoiceSelect servers={servers} settings={settings} onChange={onChange} />}
    </>
  );
  return (
    <Popover trigger="click" open={open} onOpenChange={setOpen} title={t("toolServers")} content={content} placement="topLeft" getPopupContainer={inMain}>
      <Button type="text" icon={<ToolOutlined aria-hidden />}>{on ? `${t("tools")} (${on})` : t("tools")}</Button>
    </Popover>
  );
}

function OneServer({ server, settings, onChange }: Props & { server: ToolServer }) {
  const t = useT();
  const approval = settings.servers[server.label];
  const set = (value: Approval | null) => {
    const { [server.label]: _, ...others } = settings.servers;
    const { toolChoice } = settings;
    const gone = value === null && (typeof toolChoice === "object" ? toolChoice.server === server.label : !Object.keys(others).length);
    onChange({ ...settings, servers: value === null ? others : { ...others, [server.label]: value }, toolChoice: gone ? "auto" : toolChoice });
  };
  const state = server.status === "failed" ? t("serverFailed", { why: server.error ?? "" }) : server.status === "starting" ? t("serverStarting") : server.status === "stopped" ? t("serverStopped") : t("toolCount", { n: server.tools.length });
  return (
    <>
      <Switch size="small" checked={approval !== undefined} disabled={server.status !== "ready" && approval === undefined} aria-label={server.label} onChange={(checked) => set(checked ? "always" : null)} />
      <span className="tool-server"><strong>{server.label}</strong><Tooltip title={server.tools.join(", ")}><span className={server.status === "failed" ? "bad" : "muted"}>{state}</span></Tooltip></span>
      {approval !== undefined && (
        <Select size="small" value={approval} onChange={set} aria-label={t("approval", { name: server.label })} popupMatchSelectWidth={false} options={APPROVALS.map((value) => ({ value, label: t(value) }))} />
      )}
    </>
  );
}

/** Whether an answer begins with a call: as the model likes, of any tool, or of a certain one. */
function ChoiceSelect({ servers, settings, onChange }: Props & { servers: ToolServer[] }) {
  const t = useT();
  const { toolChoice } = settings;
  const named: [string, ToolChoice][] = servers.filter(({ label }) => label in settings.servers).flatMap(({ label, tools }) =>
    tools.map((full): [string, ToolChoice] => [full, { server: label, name: full.slice(label.length + 1) }]));
  const choices = new Map<string, ToolChoice>([["auto", "auto"], ["required", "required"], ...named]);
  const value = typeof toolChoice === "string" ? toolChoice : `${toolChoice.server}_${toolChoice.name}`;
  const options = [
    { value: "auto", label: t("choiceAuto") }, { value: "required", label: t("choiceRequired") },
    ...named.map(([full]) => ({ value: full, label: t("choiceNamed", { name: full }) })),
  ];
  return (
    <label className="tool-choice">
      <span>{t("toolChoice")}</span>
      <Select size="small" value={value} options={options} onChange={(chosen) => onChange({ ...settings, toolChoice: choices.get(chosen) ?? "auto" })} aria-label={t("toolChoice")} popupMatchSelectWidth={false} />
    </label>
  );
}
