import { Tooltip } from "antd";
import { duration, useT } from "../i18n";
import type { AssistantMessage } from "../store/messages";

/** How many tokens, how fast, and why it ended. */
export function AnswerStats({ message }: { message: AssistantMessage }) {
  const t = useT();
  const { stats, state } = message;
  const facts = [
    state === "stopped" && !message.error && message.parts.length > 0 && stats ? t("stopped") : null,
    state === "cut" ? t("cut") : null,
    stats?.completionTokens ? t("tokens", { n: stats.completionTokens }) : null,
    stats?.tokensPerSecond ? t("tokensPerSecond", { n: stats.tokensPerSecond < 100 ? stats.tokensPerSecond.toFixed(1) : Math.round(stats.tokensPerSecond) }) : null,
    stats?.firstTokenMs != null ? t("firstToken", { time: duration(stats.firstTokenMs) }) : null,
  ].filter((fact) => fact !== null);
  if (!facts.length) return null;
  const prompt = stats?.promptTokens ? [t("promptTokens", { n: stats.promptTokens }), stats.cachedTokens ? t("cachedTokens", { n: stats.cachedTokens }) : null].filter(Boolean).join(", ") : null;
  return <Tooltip title={[message.model, prompt].filter(Boolean).join(" · ")}><span className="stats">{facts.join(" · ")}</span></Tooltip>;
}
