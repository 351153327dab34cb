/** The conversations that are loaded, and the list of all; every change is written to the database soon after. */

import { create } from "zustand";
import { usePreferences } from "./preferences";
import * as database from "./database";
import type { Conversation, Entry } from "./database";
import type { Message } from "./messages";
import { EMPTY, lineage, linear, merge, update, type Tree } from "./tree";
import { keep, recover } from "./unwritten";
import type { Settings } from "../settings/fields";

const TITLE_LENGTH = 60;
const WRITE_AFTER_MS = 400;

export function newId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(12)); // randomUUID() needs https, which a server in a LAN lacks
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

interface State {
  /** Null until the database has been read. */
  entries: Entry[] | null;
  loaded: Record<string, Conversation>;
  /** What the database last refused to do. */
  problem: string | null;
}

export const useConversations = create<State>()(() => ({ entries: null, loaded: {}, problem: null }));

const { getState, setState } = useConversations;
const pending = new Map<string, ReturnType<typeof setTimeout>>();
/** The conversations as the database has them. */
const written = new Map<string, Conversation>();
let recovered: Promise<void> | null = null;

/** Once, before anything is read. */
function whenRecovered(): Promise<void> {
  return (recovered ??= recover());
}

export async function loadEntries(): Promise<void> {
  try {
    const problem = await whenRecovered().then(() => null, String);
    setState({ entries: await database.listEntries(), problem });
  } catch (error) {
    setState({ entries: [], problem: String(error) });
  }
}

/** Null: there is no such conversation. */
export async function loadConversation(id: string): Promise<Conversation | null> {
  const known = getState().loaded[id];
  if (known) return known;
  await whenRecovered().catch(() => {}); // loadEntries() tells of it
  const conversation = await database.readConversation(id).catch(() => null);
  if (conversation) written.set(id, conversation);
  if (conversation) setState(({ loaded }) => ({ loaded: { ...loaded, [id]: loaded[id] ?? conversation } }));
  return conversation;
}

export function createConversation(settings: Settings = usePreferences.getState().settings, title = "", tree: Tree = EMPTY): Conversation {
  const now = Date.now();
  const conversation: Conversation = { id: newId(), title, pinned: false, created: now, updated: now, settings, tree };
  put(conversation);
  return conversation;
}

/** Put it into the state, and in a moment into the database. */
export function put(conversation: Conversation): void {
  const { id } = conversation;
  setState(({ entries, loaded }) => {
    const { settings: _, tree: __, ...entry } = conversation;
    const others = (entries ?? []).filter((other) => other.id !== id);
    const before = entries?.find((other) => other.id === id);
    const same = before && before.title === entry.title && before.pinned === entry.pinned && before.updated === entry.updated;
    return { loaded: { ...loaded, [id]: conversation }, entries: same ? entries : [...others, entry] };
  });
  if (!pending.has(id)) pending.set(id, setTimeout(() => void write(id), WRITE_AFTER_MS));
}

async function write(id: string): Promise<void> {
  clearTimeout(pending.get(id));
  pending.delete(id);
  const conversation = getState().loaded[id];
  if (!conversation) return;
  await database.writeConversation(conversation).then(
    (tree) => {
      written.set(id, conversation);
      const now = getState().loaded[id];
      if (now && tree !== conversation.tree) take({ ...now, tree });
      setState({ problem: null });
      tabs?.postMessage({ id, removed: false } satisfies Notice);
    },
    (error: unknown) => setState({ problem: String(error) }),
  );
}

/** What a tab tells the others of this browser. */
interface Notice {
  id: string;
  removed: boolean;
}

const tabs = typeof BroadcastChannel === "undefined" ? null : new BroadcastChannel("jaxllm.conversations");
if (tabs) tabs.onmessage = (event: MessageEvent<Notice>) => void heed(event.data);

/** Another tab has changed or deleted a conversation. */
async function heed({ id, removed }: Notice): Promise<void> {
  if (removed) return forget(id);
  const theirs = await database.readAsKept(id).catch(() => null);
  if (theirs && getState().loaded[id]) take(theirs);
  else if (theirs) await loadEntries();
}

/** Take what another tab has said into what is shown here; what only this tab has stays, and is written by it. */
function take(theirs: Conversation): void {
  setState(({ entries, loaded }) => {
    const { settings: _, tree: __, ...entry } = theirs;
    const tree = loaded[theirs.id] ? merge(loaded[theirs.id]!.tree, theirs.tree) : theirs.tree;
    const taken = { ...theirs, tree };
    if (written.get(theirs.id) === loaded[theirs.id]) written.set(theirs.id, taken);
    return { loaded: { ...loaded, [theirs.id]: taken }, entries: [...(entries ?? []).filter((other) => other.id !== theirs.id), entry] };
  });
}

function forget(id: string): void {
  clearTimeout(pending.get(id));
  pending.delete(id);
  written.delete(id);
  setState(({ entries, loaded }) => {
    const { [id]: _, ...others } = loaded;
    return { loaded: others, entries: (entries ?? []).filter((entry) => entry.id !== id) };
  });
}

/** The page is being closed: keep what has not been written. */
export function keepUnwritten(): void {
  keep(Object.values(getState().loaded).map((now) => ({ now, written: written.get(now.id) })).filter((one) => one.now !== one.written));
}

/** Write at once what waits to be written. */
export async function writeAll(): Promise<void> {
  await Promise.all([...pending.keys()].map(write));
}

export function change(id: string, by: (conversation: Conversation) => Conversation): void {
  const conversation = getState().loaded[id];
  if (conversation) put(by(conversation));
}

export function changeTree(id: string, by: (tree: Tree) => Tree): void {
  change(id, (conversation) => ({ ...conversation, tree: by(conversation.tree), updated: Date.now() }));
}

export function changeMessage(id: string, messageId: string, by: (message: Message) => Message): void {
  change(id, (conversation) => ({ ...conversation, tree: update(conversation.tree, messageId, by) }));
}

/** Change what the list shows of a conversation that need not be loaded. */
export async function changeEntry(id: string, by: Partial<Pick<Entry, "title" | "pinned">>): Promise<void> {
  if (getState().loaded[id]) return change(id, (conversation) => ({ ...conversation, ...by }));
  const entry = getState().entries?.find((other) => other.id === id);
  if (!entry) return;
  setState(({ entries }) => ({ entries: (entries ?? []).map((other) => (other.id === id ? { ...other, ...by } : other)) }));
  await database.writeEntry({ ...entry, ...by });
}

export async function removeConversation(id: string): Promise<void> {
  forget(id);
  await database.deleteConversation(id);
  tabs?.postMessage({ id, removed: true } satisfies Notice);
}

export async function removeAll(): Promise<void> {
  const ids = (getState().entries ?? []).map(({ id }) => id);
  ids.forEach(forget);
  await database.deleteAll();
  for (const id of ids) tabs?.postMessage({ id, removed: true } satisfies Notice);
}

/** A new conversation of all that was said down to a message. */
export function fork(conversation: Conversation, messageId: string): Conversation {
  const titles = (getState().entries ?? []).map(({ title }) => title);
  return createConversation(conversation.settings, branchTitle(conversation.title, titles), linear(lineage(conversation.tree, messageId)));
}

export async function importConversations(conversations: Conversation[]): Promise<void> {
  for (const conversation of conversations) await database.writeConversation(conversation);
  await loadEntries();
}

/** "Trees" → "Trees (2)", or the next number that no title has. */
export function branchTitle(title: string, titles: string[]): string {
  if (!title) return "";
  const stem = title.replace(/ \(\d+\)$/, "");
  for (let number = 2; ; number++) if (!titles.includes(`${stem} (${number})`)) return `${stem} (${number})`;
}

export function titleOf(text: string): string {
  const line = text.trim().split("\n")[0] ?? "";
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1)}…` : line;
}
