import { theme, type ThemeConfig } from "antd";
import { useLayoutEffect, useSyncExternalStore } from "react";
import { usePreferences } from "./store/preferences";

const darkQuery = matchMedia("(prefers-color-scheme: dark)");

function subscribe(listener: () => void): () => void {
  darkQuery.addEventListener("change", listener);
  return () => darkQuery.removeEventListener("change", listener);
}

export function useDark(): boolean {
  const preferred = usePreferences((preferences) => preferences.theme);
  const system = useSyncExternalStore(subscribe, () => darkQuery.matches);
  return preferred === "system" ? system : preferred === "dark";
}

/** Secondary texts are stronger than antd's own, which are below WCAG's 4.5:1. */
export function themeConfig(dark: boolean): ThemeConfig {
  const secondary = dark ? "rgba(255,255,255,0.68)" : "rgba(20,20,40,0.66)";
  return {
    algorithm: dark ? theme.darkAlgorithm : theme.defaultAlgorithm,
    token: {
      colorPrimary: dark ? "#8e8cf5" : "#5350c9",
      colorLink: dark ? "#a9a7ff" : "#4845bd",
      colorInfo: dark ? "#8e8cf5" : "#5350c9",
      colorError: dark ? "#ff7b7b" : "#c9252d",
      colorTextLightSolid: dark ? "#0f0f17" : "#ffffff",
      colorBgBase: dark ? "#131318" : "#ffffff",
      colorTextBase: dark ? "#ececf2" : "#17172a",
      colorTextSecondary: secondary,
      colorTextTertiary: secondary,
      colorTextDescription: secondary,
      colorTextPlaceholder: secondary,
      colorTextQuaternary: secondary,
      ...(dark ? { colorBgContainer: "#17171d", colorBgElevated: "#23232b", colorBgLayout: "#101015" } : {}),
      motion: !matchMedia("(prefers-reduced-motion: reduce)").matches,
      borderRadius: 8,
      fontFamily: "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'Noto Sans CJK SC', 'PingFang SC', 'Microsoft YaHei', sans-serif",
      fontFamilyCode: "ui-monospace, 'SF Mono', 'Cascadia Code', Menlo, Consolas, 'DejaVu Sans Mono', monospace",
    },
  };
}

/** Hand antd's colours to our own style sheet, and tell the browser which scheme it is. */
export function ThemeVariables({ dark }: { dark: boolean }): null {
  const { token } = theme.useToken();
  useLayoutEffect(() => {
    const root = document.documentElement;
    root.dataset.theme = dark ? "dark" : "light";
    const variables = {
      bg: token.colorBgContainer, side: dark ? "#101015" : "#f6f6fb", text: token.colorText, muted: token.colorTextSecondary,
      border: token.colorBorderSecondary, fill: token.colorFillTertiary, code: dark ? "#1e1e26" : "#f7f7fb",
      primary: token.colorPrimary, tint: token.colorPrimaryBg, mono: token.fontFamilyCode, font: token.fontFamily,
      error: token.colorError,
    };
    for (const [name, value] of Object.entries(variables)) root.style.setProperty(`--${name}`, value);
  }, [token, dark]);
  return null;
}
