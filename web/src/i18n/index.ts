import { usePreferences } from "../store/preferences";
import { de } from "./de";
import { en, type Texts } from "./en";
import type { Language } from "./languages";
import { zh } from "./zh";

const TEXTS: Record<Language, Texts> = { en, zh, de };

export type Translate = (name: keyof Texts, values?: Record<string, string | number>) => string;

export function translate(language: Language): Translate {
  return (name, values = {}) => TEXTS[language][name].replace(/\{(\w+)\}/g, (whole, key: string) => String(values[key] ?? whole));
}

export function useT(): Translate {
  return translate(usePreferences((preferences) => preferences.language));
}

/** 0.84 s, 12 s, 3:05 */
export function duration(ms: number): string {
  const seconds = ms / 1000;
  if (seconds < 10) return `${seconds.toFixed(seconds < 1 ? 2 : 1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  return `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")}`;
}
