import { BulbOutlined, CodeOutlined, FunctionOutlined, TableOutlined } from "@ant-design/icons";
import type { Model } from "../api/server";
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

const SMALL_PARAMETERS = 5e8;

/** Whether a model is so small that much of what it says is made up; false where its size is not known. */
function isSmall(model: Model | undefined): model is Model {
  return model !== undefined && (model.num_parameters ?? 0) > 0 && (model.num_parameters ?? 0) < SMALL_PARAMETERS;
}

/** What a conversation shows before its first message. */
export function Start({ model, onChoose }: { model: string | null; onChoose: (text: string) => void }) {
  const t = useT();
  const models = useServer((state) => state.models);
  const chosen = models.find(({ id }) => id === model) ?? models[0];
  const base = isBase(models, model);
  return (
    <div className="scroll">
      <div className="column start">
        <div className="welcome">
          <img src="./favicon.svg" alt="" width={56} height={56} />
          <div><h2>{t(base ? "welcomeBase" : "welcome")}</h2><p>{t(base ? "welcomeBaseText" : "welcomeText", { model: model ?? chosen?.id ?? "…" })}</p></div>
        </div>
        {isSmall(chosen) && <p role="note">{t("smallModel", { millions: String(Math.round((chosen.num_parameters ?? 0) / 1e6)) })}</p>}
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
