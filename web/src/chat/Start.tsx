import { BulbOutlined, CodeOutlined, FunctionOutlined, TableOutlined } from "@ant-design/icons";
import { Welcome } from "@ant-design/x";
import { useT } from "../i18n";
import { useServer } from "../serverState";

const SUGGESTIONS = [
  { key: "suggestion1", icon: <BulbOutlined /> },
  { key: "suggestion2", icon: <CodeOutlined /> },
  { key: "suggestion3", icon: <TableOutlined /> },
  { key: "suggestion4", icon: <FunctionOutlined /> },
] as const;

/** What a conversation shows before its first message. */
export function Start({ model, onChoose }: { model: string | null; onChoose: (text: string) => void }) {
  const t = useT();
  const first = useServer((state) => state.models[0]?.id ?? "…");
  return (
    <div className="scroll">
      <div className="column start">
        <Welcome variant="borderless" icon={<img src="./favicon.svg" alt="" width={56} height={56} />} title={t("welcome")} description={t("welcomeText", { model: model ?? first })} />
        <div className="suggestions">
          {SUGGESTIONS.map(({ key, icon }) => (
            <button key={key} type="button" onClick={() => onChoose(t(`${key}Text`))}>
              <strong>{icon} {t(key)}</strong>
              <span>{t(`${key}Text`)}</span>
            </button>
          ))}
        </div>
      </div>
    </div>
  );
}
