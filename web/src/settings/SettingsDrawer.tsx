import { Alert, App, Button, Collapse, Drawer, Form, Input, InputNumber, Select } from "antd";
import { useT } from "../i18n";
import type { Texts } from "../i18n/en";
import { modelOf, useServer } from "../serverState";
import { usePreferences } from "../store/preferences";
import { DEFAULTS, FIELDS, lostWithTools, usesTools, type Field, type Settings, type Structure } from "./fields";
import { FieldInput } from "./FieldInput";
import { JSONInput } from "./JSONInput";

const GROUPS: [Field["group"], keyof Texts][] = [
  ["sampling", "sampling"], ["penalties", "penalties"], ["length", "length"], ["tokens", "tokenGroup"], ["scheduling", "scheduling"],
];
const STRUCTURES: [Structure, keyof Texts][] = [
  ["none", "none"], ["json_object", "jsonObject"], ["json_schema", "jsonSchema"], ["regex", "regex"], ["choice", "choice"], ["grammar", "grammar"],
];

interface Props {
  open: boolean;
  onClose: () => void;
  settings: Settings;
  onChange: (settings: Settings) => void;
}

/** Everything that the requests of one conversation ask for. */
export function SettingsDrawer({ open, onClose, settings, onChange }: Props) {
  const t = useT();
  const { message } = App.useApp();
  const setPreference = usePreferences((preferences) => preferences.set);
  const makeDefault = () => {
    setPreference({ settings });
    message.success(t("madeDefault"));
  };
  const lost = usesTools(settings) ? lostWithTools(settings) : [];
  const panels = GROUPS.map(([group, title]) => ({
    key: group,
    label: t(title) + setCount(settings, group),
    children: <FieldGroup group={group} settings={settings} onChange={onChange} />,
  }));
  const footer = (
    <div className="drawer-foot">
      <Button onClick={() => onChange({ ...DEFAULTS, servers: settings.servers, toolChoice: settings.toolChoice, model: settings.model })}>{t("resetSettings")}</Button>
      <Button onClick={makeDefault}>{t("makeDefault")}</Button>
    </div>
  );
  return (
    <Drawer open={open} onClose={onClose} title={t("settings")} size={440} footer={footer} closable={{ "aria-label": t("close") }} destroyOnHidden>
      <Form layout="vertical" component="div">
        {lost.length > 0 && <Alert type="warning" showIcon title={t("notWithTools", { names: lost.join(", ") })} />}
        <Form.Item label={t("systemPrompt")} htmlFor="system">
          <Input.TextArea id="system" dir="auto" autoSize={{ minRows: 3, maxRows: 12 }} placeholder={t("systemHint")} value={settings.system} onChange={(event) => onChange({ ...settings, system: event.target.value })} />
        </Form.Item>
        <Form.Item label={t("structure")} htmlFor="structure">
          <Select id="structure" value={settings.structure} options={STRUCTURES.map(([value, name]) => ({ value, label: t(name) }))} onChange={(structure) => onChange({ ...settings, structure })} />
        </Form.Item>
        {settings.structure === "json_schema" ? (
          <Form.Item label={t("structureText")} htmlFor="structureText">
            <JSONInput id="structureText" text={settings.structureText} onText={(structureText) => onChange({ ...settings, structureText })} />
          </Form.Item>
        ) : !["none", "json_object"].includes(settings.structure) && (
          <Form.Item label={t("structureText")} htmlFor="structureText">
            <Input.TextArea id="structureText" className="mono" autoSize={{ minRows: 3, maxRows: 14 }} value={settings.structureText} onChange={(event) => onChange({ ...settings, structureText: event.target.value })} />
          </Form.Item>
        )}
        <Form.Item label={t("logprobs")} htmlFor="logprobs" extra={t("logprobsHint")}>
          <InputNumber id="logprobs" min={0} max={20} precision={0} placeholder={t("off")} value={settings.logprobs} onChange={(logprobs) => onChange({ ...settings, logprobs })} />
        </Form.Item>
        <Collapse items={panels} defaultActiveKey={["sampling"]} ghost size="small" />
      </Form>
    </Drawer>
  );
}

function setCount(settings: Settings, group: Field["group"]): string {
  const count = FIELDS.filter((field) => field.group === group && field.name in settings.values).length;
  return count ? ` (${count})` : "";
}

function FieldGroup({ group, settings, onChange }: { group: Field["group"]; settings: Settings; onChange: (settings: Settings) => void }) {
  const t = useT();
  const defaults = useServer((state) => state.defaults[modelOf(state.models, settings.model)?.id ?? ""]);
  return (
    <div className="fields">
      {FIELDS.filter((field) => field.group === group).map((field) => {
        const byModel = defaults?.[field.name];
        return (
          <Form.Item key={field.name} label={<code>{field.name}</code>} htmlFor={`field-${field.name}`}>
            <FieldInput
              field={field} value={settings.values[field.name]} placeholder={byModel == null ? t("byServer") : t("byModel", { value: byModel })}
              onChange={(value) => {
                const { [field.name]: _, ...others } = settings.values;
                onChange({ ...settings, values: value === undefined ? others : { ...others, [field.name]: value } });
              }}
            />
          </Form.Item>
        );
      })}
    </div>
  );
}
