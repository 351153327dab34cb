import { Badge, message, Select, type BadgeProps } from "antd";
import type { ModelStatus } from "../api/server";
import { useT } from "../i18n";
import { MODEL_STATES } from "../modelStates";
import { modelOf, refreshModels, useServer, whenLoaded } from "../serverState";
import type { Settings } from "../settings/fields";

const SIGNS: Record<ModelStatus["value"], BadgeProps["status"]> = {
  unloaded: "default", loading: "processing", loaded: "success", sleeping: "warning", failed: "error",
};

/** Which model the conversation talks to. With several each shows its state, and choosing one has it loaded. */
export function ModelSelect({ settings, onChange }: { settings: Settings; onChange: (settings: Settings) => void }) {
  const t = useT();
  const models = useServer((state) => state.models);
  const names = models.map((model) => model.id);
  const value = settings.model ?? names[0];
  const known = value && !names.includes(value) ? [...names, value] : names;
  const [notices, notice] = message.useMessage();
  const label = (name: string) => {
    const status = models.length > 1 ? models.find((model) => model.id === name)?.status : undefined;
    return status ? <ModelLabel name={name} status={status} /> : name;
  };
  const choose = (model: string) => {
    onChange({ ...settings, model });
    void whenLoaded(model).catch((error: Error) => void notices.error(t("notLoadedBecause", { model, why: error.message })));
  };
  return (
    <>
      {notice}
      <Select
        className="model" variant="borderless" aria-label={t("model")} popupMatchSelectWidth={false} {...(value ? { value } : {})}
        options={known.map((name) => ({ value: name, label: label(name), title: modelOf(models, name)?.status.error ?? "" }))}
        onChange={choose} onOpenChange={(open) => open && void refreshModels().catch(() => {})}
      />
    </>
  );
}

function ModelLabel({ name, status }: { name: string; status: ModelStatus }) {
  const t = useT();
  const share = status.total ? ` ${Math.round((100 * (status.done ?? 0)) / status.total)} %` : "";
  return (
    <span className="model-label">
      <Badge status={SIGNS[status.value]!} /> {name} <span className="muted">{t(MODEL_STATES[status.value])}{share}</span>
    </span>
  );
}
