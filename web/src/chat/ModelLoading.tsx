import { Alert } from "antd";
import type { Model } from "../api/server";
import { useT } from "../i18n";

/** How far the model that the conversation talks to is loaded, while it is. */
export function ModelLoading({ model }: { model: Model | undefined }) {
  const t = useT();
  if (model?.status.value !== "loading") return null;
  const { doing, done, total } = model.status;
  return <Alert banner type="info" title={t("loadingOne", { model: model.id })} description={total ? `${doing}: ${done} / ${total}` : doing} />;
}
