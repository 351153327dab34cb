/** What is being written in each conversation: it waits there while another one is shown. */

import { create } from "zustand";
import type { Picture, TextFile } from "./messages";

export interface Draft {
  text: string;
  files: TextFile[];
  pictures: Picture[];
}

const EMPTY: Draft = { text: "", files: [], pictures: [] };

/** Conversation -> its draft; the one that has not begun has the name "". */
const useDrafts = create<Record<string, Draft>>()(() => ({}));

export function useDraft(id: string | null): Draft {
  return useDrafts((drafts) => drafts[id ?? ""] ?? EMPTY);
}

export function changeDraft(id: string | null, by: (draft: Draft) => Partial<Draft>): void {
  useDrafts.setState((drafts) => {
    const draft = drafts[id ?? ""] ?? EMPTY;
    return { [id ?? ""]: { ...draft, ...by(draft) } };
  });
}

export function forgetDraft(id: string | null): void {
  useDrafts.setState(({ [id ?? ""]: _, ...others }) => others, true);
}
