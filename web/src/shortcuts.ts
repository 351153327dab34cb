import { useEffect, useRef } from "react";

export const SHORTCUTS = [
  { keys: ["Ctrl", "Alt", "N"], text: "shortcutNew" },
  { keys: ["Ctrl", "K"], text: "shortcutSearch" },
  { keys: ["/"], text: "shortcutFocus" },
  { keys: ["Esc"], text: "shortcutStop" },
  { keys: ["Ctrl", ","], text: "shortcutSettings" },
  { keys: ["Ctrl", "Alt", "C"], text: "shortcutCopy" },
  { keys: ["Ctrl", "Alt", "R"], text: "shortcutRegenerate" },
  { keys: ["↑"], text: "shortcutEdit" },
  { keys: ["?"], text: "shortcutHelp" },
] as const;

export type Action = "help" | "search" | "focus" | "stop" | "settings" | "copy" | "regenerate" | "new";

/** The action of a key, if it has one; what is typed into a field has none. */
export function actionOf(event: KeyboardEvent): Action | null {
  const target = event.target as HTMLElement;
  const typing = target.matches?.("input, textarea, select, [contenteditable]") ?? false;
  const command = event.ctrlKey || event.metaKey;
  if (event.key === "Escape") return "stop";
  if (command && event.altKey) return ({ KeyN: "new", KeyC: "copy", KeyR: "regenerate" } as const)[event.code] ?? null;
  if (command && event.key.toLowerCase() === "k") return "search";
  if (command && event.key === ",") return "settings";
  if (typing || command || event.altKey) return null;
  return event.key === "/" ? "focus" : event.key === "?" ? "help" : null;
}

/** Handle these actions while the component is shown. */
export function useShortcuts(handlers: Partial<Record<Action, () => void>>): void {
  const latest = useRef(handlers);
  latest.current = handlers;
  useEffect(() => {
    const listen = (event: KeyboardEvent) => {
      const action = actionOf(event);
      const handler = action && latest.current[action];
      if (!handler || event.defaultPrevented) return;
      if (action !== "stop") event.preventDefault();
      handler();
    };
    addEventListener("keydown", listen);
    return () => removeEventListener("keydown", listen);
  }, []);
}
