export const LANGUAGES = { en: "English", zh: "中文", de: "Deutsch" } as const;

export type Language = keyof typeof LANGUAGES;

export function browserLanguage(): Language {
  const wanted = navigator.languages.map((tag) => tag.slice(0, 2).toLowerCase());
  return wanted.find((tag): tag is Language => tag in LANGUAGES) ?? "en";
}
