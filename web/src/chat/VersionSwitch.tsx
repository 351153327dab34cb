import { LeftOutlined, RightOutlined } from "@ant-design/icons";
import { Button } from "antd";
import { useT } from "../i18n";
import { changeTree } from "../store/conversations";
import { step } from "../store/tree";

interface Props {
  conversationId: string;
  id: string;
  index: number;
  count: number;
  disabled: boolean;
}

/** ‹ 2/3 › */
export function VersionSwitch({ conversationId, id, index, count, disabled }: Props) {
  const t = useT();
  if (count < 2) return null;
  const to = (by: number) => changeTree(conversationId, (tree) => step(tree, id, by));
  return (
    <span className="versions">
      <Button type="text" size="small" icon={<LeftOutlined aria-hidden />} disabled={disabled || index === 0} aria-label={t("previous")} onClick={() => to(-1)} />
      <span aria-label={t("version", { i: index + 1, n: count })} role="img">{index + 1}/{count}</span>
      <Button type="text" size="small" icon={<RightOutlined aria-hidden />} disabled={disabled || index === count - 1} aria-label={t("next")} onClick={() => to(1)} />
    </span>
  );
}
