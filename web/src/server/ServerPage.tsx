import { ArrowLeftOutlined, MenuFoldOutlined, MenuUnfoldOutlined } from "@ant-design/icons";
import { Alert, Badge, Button, Card, Table } from "antd";
import { useEffect, useState } from "react";
import { serverInfo, type ServerInfo } from "../api/server";
import { useT } from "../i18n";
import { MODEL_STATES } from "../modelStates";
import { useServer } from "../serverState";
import { EVERY_MS, KEPT, rates, useLive, type Moment } from "./useLive";
import { Sparkline } from "./Sparkline";

export function ServerPage({ listOpen, onToggleList }: { listOpen: boolean; onToggleList: () => void }) {
  const t = useT();
  const { moments, failed } = useLive();
  const now = moments.at(-1);
  useEffect(() => {
    document.title = `${t("serverTitle")} · jaxllm`;
  }, [t]);
  return (
    <main className="chat">
      <header className="bar">
        <Button type="text" icon={listOpen ? <MenuFoldOutlined aria-hidden /> : <MenuUnfoldOutlined aria-hidden />} onClick={onToggleList} aria-expanded={listOpen} aria-label={t(listOpen ? "closeList" : "openList")} />
        <h1 className="bar-title">{t("serverTitle")}</h1>
        {now && <Badge status={now.pending ? "processing" : "success"} text={now.pending ? t("compiling", { n: now.pending }) : t("ready")} />}
        <Button type="text" icon={<ArrowLeftOutlined aria-hidden />} onClick={() => history.back()} aria-label={t("back")} title={t("back")} />
      </header>
      {failed && <Alert banner type="error" title={t("unreachable")} />}
      <div className="scroll" tabIndex={0} role="region" aria-label={t("serverTitle")}>
        <div className="column wide">
          {now && <LiveCards moments={moments} now={now} />}
          <Models />
          <Engine />
        </div>
      </div>
    </main>
  );
}

function LiveCards({ moments, now }: { moments: Moment[]; now: Moment }) {
  const t = useT();
  const generated = rates(moments, (moment) => moment.generated);
  const processed = rates(moments, (moment) => moment.processed);
  const used = now.pages - now.pagesFree;
  const hits = now.lookups ? Math.round((100 * now.hits) / now.lookups) : 0;
  const cards: { name: string; value: string; values: number[]; top?: number }[] = [
    { name: t("load"), value: String(now.running), values: moments.map((moment) => moment.running) },
    { name: t("queue"), value: String(now.waiting), values: moments.map((moment) => moment.waiting) },
    { name: t("pages"), value: t("of", { a: used, b: now.pages }), values: moments.map((moment) => moment.pages - moment.pagesFree), top: now.pages },
    { name: t("generated"), value: (generated.at(-1) ?? 0).toFixed(1), values: generated },
    { name: t("processed"), value: (processed.at(-1) ?? 0).toFixed(1), values: processed },
    { name: t("cacheHits"), value: `${hits} %`, values: moments.map((moment) => (moment.lookups ? moment.hits / moment.lookups : 0)), top: 1 },
    { name: t("compiles"), value: `${now.compiles} (${now.compileSeconds.toFixed(1)} s)`, values: moments.map((moment) => moment.compiles) },
    { name: t("preemptions"), value: String(now.preemptions), values: moments.map((moment) => moment.preemptions) },
  ];
  return (
    <div className="cards">
      {cards.map(({ name, value, values, top }) => (
        <Card key={name} size="small">
          <div className="card-name">{name}</div>
          <div className="card-value">{value}</div>
          <Sparkline values={values} kept={KEPT} label={t("overTime", { name, n: (KEPT * EVERY_MS) / 1000 })} {...(top === undefined ? {} : { top })} />
        </Card>
      ))}
    </div>
  );
}

function Models() {
  const t = useT();
  const models = useServer((state) => state.models);
  const servers = useServer((state) => state.toolServers);
  return (
    <>
      <h2>{t("models")}</h2>
      <ul className="plain">{models.map((model) => <li key={model.id}><strong>{model.id}</strong> <span className="muted">{[t(MODEL_STATES[model.status.value]), ...(model.max_model_len === null ? [] : [t("contextLength", { n: model.max_model_len })]), ...(model.status.error ? [model.status.error] : [])].join(", ")}</span></li>)}</ul>
      {servers.length > 0 && <h2>{t("toolServers")}</h2>}
      <ul className="plain">
        {servers.map((server) => (
          <li key={server.label}>
            <strong>{server.label}</strong> <Badge status={server.status === "ready" ? "success" : server.status === "failed" ? "error" : "default"} text={server.status} />
            <span className="muted">{server.error ?? server.tools.join(", ")}</span>
          </li>
        ))}
      </ul>
    </>
  );
}

function Engine() {
  const t = useT();
  const [info, setInfo] = useState<ServerInfo | null>(null);
  useEffect(() => {
    void serverInfo().then(setInfo, () => {}); // the head of the page says that the server is away
  }, []);
  if (!info) return null;
  const rows = (values: Record<string, unknown>) => Object.entries(values).map(([name, value]) => ({ key: name, name, value: typeof value === "string" ? value : JSON.stringify(value) }));
  const columns = [
    { title: t("setting"), dataIndex: "name", render: (name: string) => <code>{name}</code> },
    { title: t("value"), dataIndex: "value" },
  ];
  return (
    <>
      <h2>{t("engine")} <span className="muted">jaxllm {info.version}</span></h2>
      <Table size="small" pagination={false} columns={columns} dataSource={rows(info.engine)} />
      <h2>{t("engineSettings")}</h2>
      <Table size="small" pagination={false} columns={columns} dataSource={rows(info.settings)} />
    </>
  );
}
