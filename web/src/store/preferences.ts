/** What this browser remembers of the person's taste. */

import { create } from "zustand";
import { persist } from "zustand/middleware";
import { DEFAULTS, type Settings } from "../settings/fields";
import { browserLanguage, type Language } from "../i18n/languages";

export type Theme = "system" | "light" | "dark";
export type Titles = "words" | "model";

interface Preferences {
  language: Language;
  theme: Theme;
  /** A new conversation's title: its first words, or one that the model gives. */
  titles: Titles;
  /** What a new conversation begins with. */
  settings: Settings;
  set: (change: Partial<Omit<Preferences, "set">>) => void;
}

export const usePreferences = create<Preferences>()(
  persist((set) => ({ language: browserLanguage(), theme: "system" as Theme, titles: "words" as Titles, settings: DEFAULTS, set: (change) => set(change) }), {
    name: "jaxllm.preferences",
    merge: (kept, now) => ({ ...now, ...(kept as Partial<Preferences>), settings: { ...DEFAULTS, ...(kept as Partial<Preferences> | undefined)?.settings } }),
  }),
);
