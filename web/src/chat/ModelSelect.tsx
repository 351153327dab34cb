import { Select } from "antd";
import { useT } from "../i18n";
import { useServer } from "../serverState";
import type { Settings } from "../settings/fields";

export function ModelSelect({ settings, onChange }: { settings: Settings; onChange: (settings: Settings) => void }) {
  const t = useT();
  const models = useServer((state) => state.models);
  const names = models.map((model) => model.id);
  const value = settings.model ?? names[0];
  const known = value && !names.includes(value) ? [...names, value] : names;
  return (
    <Select
      className="model" variant="borderless" aria-label={t("model")} popupMatchSelectWidth={false} {...(value ? { value } : {})}
      options={known.map((name) => ({ value: name, label: name }))} onChange={(model) => onChange({ ...settings, model })}
    />
  );
}
