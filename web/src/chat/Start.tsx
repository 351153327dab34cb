import { BulbOutlined, CodeOutlined, FunctionOutlined, TableOutlined } from "@ant-design/icons";
import { useT } from "../i18n";
import { isBase, useServer } from "../serverState";

const SUGGESTIONS = [
  { key: "suggestion1", icon: <BulbOutlined aria-hidden /> },
  { key: "suggestion2", icon: <CodeOutlined aria-hidden /> },
  { key: "suggestion3", icon: <TableOutlined aria-hidden /> },
  { key: "suggestion4", icon: <FunctionOutlined aria-hidden /> },
] as const;

const BEGINNINGS = [
  { key: "beginning1", icon: <BulbOutlined aria-hidden /> },
  { key: "beginning2", icon: <CodeOutlined aria-hidden /> },
] as const;

/** What a conversation shows before its first message. */
export function Start({ model, onChoose }: { model: string | null; onChoose: (text: string) => void }) {
  const t = useT();
  const first = useServer((state) => state.models[0]?.id ?? "…");
  const base = useServer((state) => isBase(state.models, model));
  return (
    <div className="scroll">
      <div className="column start">
        <div className="welcome">
          <img src="./favicon.svg" alt="" width={56} height={56} />
          <div><h2>{t(base ? "welcomeBase" : "welcome")}</h2><p>{t(base ? "welcomeBaseText" : "welcomeText", { model: model ?? first })}</p></div>
        </div>
        <div className="suggestions">
          {(base ? BEGINNINGS : SUGGESTIONS).map(({ key, icon }) => (
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
