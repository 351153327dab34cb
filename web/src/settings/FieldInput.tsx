import { Input, InputNumber, Select } from "antd";
import { useState } from "react";
import { useT } from "../i18n";
import type { Field, Value } from "./fields";
import { JSONInput } from "./JSONInput";

interface Props {
  field: Field;
  /** Undefined: the field is not sent. */
  value: Value | undefined;
  placeholder: string;
  onChange: (value: Value | undefined) => void;
}

export function FieldInput({ field, value, placeholder, onChange }: Props) {
  const t = useT();
  const id = `field-${field.name}`;
  switch (field.kind) {
    case "number":
    case "integer":
      return (
        <InputNumber
          id={id} style={{ width: "100%" }} placeholder={placeholder} value={(value as number | undefined) ?? null} step={field.step ?? 1}
          {...(field.min === undefined ? {} : { min: field.min })} {...(field.max === undefined ? {} : { max: field.max })} {...(field.kind === "integer" ? { precision: 0 } : {})}
          onChange={(number) => onChange(number ?? undefined)}
        />
      );
    case "string":
      return <Input id={id} dir="auto" placeholder={placeholder} value={(value as string | undefined) ?? ""} onChange={(event) => onChange(event.target.value || undefined)} />;
    case "flag":
      return (
        <Select
          id={id} allowClear placeholder={placeholder} {...(value === undefined ? {} : { value: String(value) })}
          options={[{ value: "true", label: t("yes") }, { value: "false", label: t("no") }]} onChange={(chosen: string | undefined) => onChange(chosen === undefined ? undefined : chosen === "true")}
        />
      );
    case "choice":
      return (
        <Select
          id={id} allowClear placeholder={placeholder} {...(value === undefined ? {} : { value: value as string })}
          options={field.choices!.map((choice) => ({ value: choice, label: choice }))} onChange={(chosen: string | undefined) => onChange(chosen)}
        />
      );
    case "lines":
      return <TextList id={id} hint={t("perLine")} values={(value as string[] | undefined) ?? []} split={"\n"} onChange={(lines) => onChange(lines.length ? lines : undefined)} />;
    case "integers": {
      const change = (texts: string[]) => {
        const numbers = texts.map(Number).filter(Number.isInteger);
        onChange(numbers.length ? numbers : undefined);
      };
      return <TextList id={id} hint={t("withCommas")} values={((value as number[] | undefined) ?? []).map(String)} split="," onChange={change} />;
    }
    case "json": {
      const change = (text: string) => {
        try {
          onChange(text.trim() ? (JSON.parse(text) as Record<string, unknown>) : undefined);
        } catch {
          return; // JSONInput says so
        }
      };
      return <JSONInput id={id} text={value === undefined ? "" : JSON.stringify(value)} onText={change} />;
    }
  }
}

/** A list as text. What is being typed, such as a comma at its end, stays as it is. */
function TextList({ id, hint, values, split, onChange }: { id: string; hint: string; values: string[]; split: string; onChange: (values: string[]) => void }) {
  const [text, setText] = useState(values.join(split));
  const change = (next: string) => {
    setText(next);
    onChange(next.split(split).map((part) => (split === "," ? part.trim() : part)).filter(Boolean));
  };
  return <Input.TextArea id={id} dir="auto" autoSize={{ minRows: 1, maxRows: 6 }} placeholder={hint} value={text} onChange={(event) => change(event.target.value)} />;
}
