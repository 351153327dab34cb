/** What the states of a model are called. */

import type { ModelStatus } from "./api/server";
import type { Texts } from "./i18n/en";

export const MODEL_STATES: Record<ModelStatus["value"], keyof Texts> = {
  unloaded: "modelUnloaded", loading: "modelLoading", loaded: "modelLoaded", sleeping: "modelSleeping", failed: "modelFailed",
};
