import { ArrowUpOutlined, CameraOutlined, FileTextOutlined, PaperClipOutlined, PictureOutlined, UploadOutlined } from "@ant-design/icons";
import { Attachments, Sender } from "@ant-design/x";
import { App, Button, Tag } from "antd";
import { useEffect, useRef } from "react";
import { textOfFile } from "../api/files";
import { APIError } from "../api/http";
import { useT } from "../i18n";
import { isBase, modelOf, sees, useServer, whenLoaded } from "../serverState";
import type { Settings } from "../settings/fields";
import { changeDraft, type Draft } from "../store/drafts";
import type { TextFile } from "../store/messages";
import type { TreeNode } from "../store/tree";
import { useShortcuts } from "../shortcuts";
import { isTouched, sends } from "./enter";
import { freeName, isLong } from "./paste";
import { MAX_FILE_BYTES, MAX_FILE_TEXT, readTextFile } from "./textFiles";
import { isPicture, PictureButton, PictureList, readPicture } from "./Pictures";
import { stop } from "./run";
import { ToolSwitches } from "./ToolSwitches";

interface Props {
  id: string | null;
  draft: Draft;
  /** How many it has; null where that is not known. */
  tokens: number | null;
  settings: Settings;
  onSettings: (settings: Settings) => void;
  running: boolean;
  shown: TreeNode[];
  onSend: () => void;
}

export function Composer({ id, draft, tokens, settings, onSettings, running, shown, onSend }: Props) {
  const t = useT();
  const touches = isTouched();
  const base = useServer((state) => isBase(state.models, settings.model));
  const box = useRef<HTMLDivElement>(null);
  const seeing = useServer((state) => sees(state, settings.model)) === true;
  const { text: written, files, pictures } = draft;
  const blank = !written.trim() && !files.length && !pictures.length;
  const setFiles = (by: (files: TextFile[]) => TextFile[]) => changeDraft(id, (at) => ({ files: by(at.files) }));
  const { message } = App.useApp();
  const { refuse, addPicture } = useAddPicture(id, settings.model);
  const addText = useAddFile(setFiles);
  const add = (file: File) => (isPicture(file) ? addPicture(file) : addText(file));
  const focus = () => box.current?.querySelector("textarea")?.focus();
  useShortcuts({ focus });
  useEffect(() => {
    box.current?.querySelector("textarea")?.setAttribute("dir", "auto"); // Sender takes no dir
    focus();
  }, []);
  const submit = () => {
    if (!running && !blank && !(pictures.length && refuse(pictures[0]!.name))) onSend();
  };
  const paste = (event: React.ClipboardEvent) => {
    const text = event.clipboardData.getData("text/plain");
    if (event.clipboardData.files.length || !isLong(text)) return;
    event.preventDefault();
    const name = freeName(t("pasted"), files);
    setFiles((before) => [...before, { name, text }]);
    message.info(t("pastedNote", { name }));
  };
  const intoMessage = (file: TextFile) => {
    changeDraft(id, (at) => ({ text: [at.text, file.text].filter(Boolean).join("\n\n"), files: at.files.filter((other) => other !== file) }));
    focus();
  };
  const press = (event: React.KeyboardEvent): void | false => {
    if (sends({ key: event.key, shiftKey: event.shiftKey, isComposing: event.nativeEvent.isComposing }, touches)) {
      event.preventDefault();
      submit();
      return false; // Sender sends only by a button of its own
    }
    if (event.key === "Enter") return false;
    if (event.key === "ArrowUp" && !written && !running && shown.length) {
      event.preventDefault();
      const buttons = document.querySelectorAll<HTMLButtonElement>("[data-edit]");
      buttons[buttons.length - 1]?.click();
    }
  };
  return (
    <div className="composer" ref={box}>
      <Sender
        value={written} onChange={(text) => changeDraft(id, () => ({ text }))} placeholder={t(base ? "textHint" : touches ? "messageHintTouch" : "messageHint")}
        autoSize={{ minRows: 1, maxRows: 10 }} onPaste={paste} onPasteFile={(pasted) => Array.from(pasted).forEach(add)} onKeyDown={press} suffix={false}
        header={(files.length > 0 || pictures.length > 0) && (
          <div className="files">
            <PictureList pictures={pictures} onRemove={(picture) => {
              changeDraft(id, (at) => ({ pictures: at.pictures.filter((other) => other !== picture) }));
              focus();
            }} />
            {files.map((file, at) => (
              <Tag key={at} icon={<FileButton file={file} onClick={() => intoMessage(file)} />} closable={{ "aria-label": t("removeFile", { name: file.name }) }} onClose={(event) => {
                event.preventDefault();
                setFiles((before) => before.filter((_, other) => other !== at));
              }}><bdi>{file.name}</bdi></Tag>
            ))}
          </div>
        )}
        footer={
          <div className="composer-foot">
            <span>
              <Attachments
                multiple items={[]} beforeUpload={(file) => (add(file), false)} getDropContainer={() => document.body}
                placeholder={{ icon: <UploadOutlined aria-hidden />, title: t(seeing ? "dropHereSeeing" : "dropHere"), description: t(seeing ? "dropTextSeeing" : "dropText") }}
              >
                <Button type="text" icon={<PaperClipOutlined aria-hidden />} aria-label={t("attach")} title={t("attach")} />
              </Attachments>
              {seeing && <PictureButton name={t("attachPictures")} icon={<PictureOutlined aria-hidden />} onPicture={add} />}
              {seeing && touches && <PictureButton name={t("takePicture")} icon={<CameraOutlined aria-hidden />} camera onPicture={add} />}
              <ToolSwitches settings={settings} onChange={onSettings} />
            </span>
            <span>
              {tokens !== null && tokens > 0 && <span className="draft-tokens">{t("tokens", { n: tokens })}</span>}
              {running ? (
                <Button shape="circle" icon={<span className="stop-sign" aria-hidden />} aria-label={t("stop")} title={t("stop")} onClick={() => id !== null && stop(id)} />
              ) : (
                <Button type="primary" shape="circle" icon={<ArrowUpOutlined aria-hidden />} disabled={blank} aria-label={t("send")} title={t("send")} onClick={submit} />
              )}
            </span>
          </div>
        }
      />
    </div>
  );
}

function FileButton({ file, onClick }: { file: TextFile; onClick: () => void }) {
  const name = useT()("intoMessage", { name: file.name });
  return <button type="button" className="bare" aria-label={name} title={name} onClick={onClick}><FileTextOutlined aria-hidden /></button>;
}

/** Puts pictures into a draft, one after the other, unless the model sees none. */
function useAddPicture(id: string | null, model: string | null) {
  const t = useT();
  const { message } = App.useApp();
  const last = useRef(Promise.resolve());
  const refuse = (name: string): boolean => {
    const state = useServer.getState();
    if (sees(state, model) !== false) return false;
    message.error(t("noPictures", { name, model: modelOf(state.models, model)?.id ?? "" }));
    return true;
  };
  const add = async (file: File) => {
    try {
      if (sees(useServer.getState(), model) === null) await whenLoaded(model);
    } catch (error) {
      if (!(error instanceof APIError)) throw error;
      return void message.error(t("notLoadedBecause", { model: model ?? "", why: error.message }));
    }
    if (refuse(file.name)) return;
    const url = await readPicture(file);
    if (url === null) message.error(t("badPicture", { name: file.name }));
    else changeDraft(id, ({ pictures }) => ({ pictures: [...pictures, { name: freeName(file.name, pictures), url }] }));
  };
  const addPicture = (file: File) => {
    const before = last.current;
    last.current = new Promise((done) => void before.then(() => add(file)).finally(done));
  };
  return { refuse, addPicture };
}

function useAddFile(setFiles: (by: (files: TextFile[]) => TextFile[]) => void) {
  const t = useT();
  const { message } = App.useApp();
  const addPDF = async (file: File) => {
    const { name } = file;
    const reading = message.loading(t("pdfReading", { name }), 0);
    try {
      const text = await textOfFile(file);
      setFiles((before) => [...before, { name, text }]);
    } catch (error) {
      if (!(error instanceof APIError)) throw error;
      message.error(error.status === 400 ? `${name} ${error.message}` : `${name}: ${error.message}`);
    } finally {
      reading();
    }
  };
  return (file: File) => {
    void (async () => {
      if (file.type === "application/pdf" || /\.pdf$/i.test(file.name)) return addPDF(file);
      if (file.size > MAX_FILE_BYTES) return void message.error(t("tooLarge", { name: file.name, limit: MAX_FILE_TEXT }));
      const read = await readTextFile(file);
      if (read === null) return void message.error(t("notText", { name: file.name }));
      setFiles((before) => [...before, { name: file.name, text: read.text }]);
      if (read.guessed !== null) message.info(t("guessedEncoding", { name: file.name, encoding: read.guessed }));
    })();
  };
}
