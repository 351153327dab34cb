import { Progress, Tooltip } from "antd";
import { useT } from "../i18n";
import { contextOf, useServer } from "../serverState";

interface Props {
  /** Tokens of the conversation. */
  said: number;
  /** Tokens of what is being written. */
  drafted: number;
  model: string | null;
}

/** How much of the model's context the conversation takes, with what is being written. */
export function ContextGauge({ said, drafted, model }: Props) {
  const t = useT();
  const all = useServer((state) => contextOf(state.models, model));
  if (all === null) return null;
  const used = said + drafted;
  const text = t("contextUse", { used, all });
  return (
    <Tooltip title={<>{text}{drafted > 0 && <><br />{t("draftTokens", { n: drafted })}</>}</>}>
      <span className="gauge" role="meter" tabIndex={0} aria-label={t("context")} aria-valuemin={0} aria-valuemax={all} aria-valuenow={used} aria-valuetext={text}>
        <Progress type="circle" size={22} strokeWidth={14} percent={Math.min(100, (100 * used) / all)} showInfo={false} status={used > all ? "exception" : "normal"} aria-hidden />
        <span className="gauge-text">{compact(used)} / {compact(all)}</span>
      </span>
    </Tooltip>
  );
}

/** 950, 8.2k, 131k */
function compact(count: number): string {
  if (count < 1000) return String(count);
  return count < 10_000 ? `${(count / 1000).toFixed(1)}k` : `${Math.round(count / 1000)}k`;
}
