import type enX from "@ant-design/x/locale/en_US";

/** What Ant Design X says by itself and has no German for, as far as this page uses it. */
export const deX: Pick<typeof enX, "Conversations" | "Sender"> = {
  Conversations: { create: "Neue Unterhaltung" },
  Sender: { stopLoading: "Antwort anhalten", speechRecording: "Aufnahme läuft" },
};
