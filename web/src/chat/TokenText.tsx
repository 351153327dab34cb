import { Popover } from "antd";
import { useT } from "../i18n";
import { inMain } from "../popups";
import type { Token } from "../store/messages";

/** An answer's tokens, coloured by their probabilities; hovering or focusing one shows the likeliest ones in its place. */
export function TokenText({ tokens }: { tokens: Token[] }) {
  return (
    <div className="tokens" dir="auto">
      {tokens.map((token, at) => (
        <Popover key={at} trigger={["hover", "focus"]} mouseEnterDelay={0.05} getPopupContainer={inMain} content={<Alternatives token={token} />}>
          <span className="token" tabIndex={0} role="button" aria-label={visible(token.text)} style={{ "--p": Math.exp(token.logprob) } as React.CSSProperties}>{token.text}</span>
        </Popover>
      ))}
    </div>
  );
}

function Alternatives({ token }: { token: Token }) {
  const t = useT();
  const listed = token.top.some((other) => other.text === token.text);
  const rows = listed ? token.top : [...token.top, token];
  return (
    <table className="alternatives">
      <caption>{t("alternatives")}</caption>
      <tbody>
        {rows.map((row, at) => {
          const chosen = row.text === token.text;
          return (
            <tr key={at} className={chosen ? "chosen" : ""}>
              <th scope="row"><code>{visible(row.text)}</code>{chosen && <span className="sr-only"> ({t("chosen")})</span>}</th>
              <td><span className="share" style={{ width: `${60 * Math.exp(row.logprob)}px` }} /></td>
              <td>{percent(row.logprob)}</td>
              <td>{row.logprob.toFixed(2)}</td>
            </tr>
          );
        })}
      </tbody>
    </table>
  );
}

function visible(text: string): string {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";
}

function percent(logprob: number): string {
  const share = 100 * Math.exp(logprob);
  return share < 0.1 ? "<0.1%" : `${share.toFixed(1)}%`;
}
