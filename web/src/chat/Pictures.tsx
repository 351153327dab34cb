/** Pictures that a model is shown: taken from the person, made small enough to be kept and sent, and shown again. */

import { CloseOutlined } from "@ant-design/icons";
import { Button } from "antd";
import { useRef } from "react";
import { useT } from "../i18n";
import type { Picture } from "../store/messages";

const LONGEST_SIDE = 2048;
const MOST_BYTES = 2 ** 20;
const JPEG_QUALITY = 0.85;

/** SVG is read as text, as no model sees it. */
export function isPicture(file: File): boolean {
  return file.type.startsWith("image/") && !file.type.includes("xml");
}

/** The size of a picture once neither side is too long. */
function fitted(width: number, height: number): { width: number; height: number } {
  const scale = Math.min(1, LONGEST_SIDE / Math.max(width, height));
  return { width: Math.max(1, Math.round(scale * width)), height: Math.max(1, Math.round(scale * height)) };
}

/** A picture as a data: URL, drawn anew as PNG or JPEG unless it is small; null where the browser cannot read it. */
export async function readPicture(file: Blob): Promise<string | null> {
  const bitmap = await decoded(file);
  if (bitmap === null) return null;
  const { width, height } = fitted(bitmap.width, bitmap.height);
  const photo = file.type === "image/jpeg";
  if ((photo || file.type === "image/png") && file.size <= MOST_BYTES && width === bitmap.width && height === bitmap.height) return dataURL(file);
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const context = canvas.getContext("2d")!;
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, width, height);
  const png = photo ? null : await encoded(canvas, "image/png");
  if (png !== null && png.size <= MOST_BYTES) return dataURL(png);
  context.globalCompositeOperation = "destination-over"; // JPEG has no transparency
  context.fillStyle = "white";
  context.fillRect(0, 0, width, height);
  return dataURL(await encoded(canvas, "image/jpeg"));
}

async function decoded(file: Blob): Promise<ImageBitmap | null> {
  try {
    return await createImageBitmap(file);
  } catch (error) {
    if (error instanceof DOMException) return null; // damaged, or of a kind that it does not know
    throw error;
  }
}

function encoded(canvas: HTMLCanvasElement, type: string): Promise<Blob> {
  return new Promise((done, fail) => canvas.toBlob((blob) => (blob ? done(blob) : fail(new Error(`the browser made no ${type}`))), type, JPEG_QUALITY));
}

function dataURL(blob: Blob): Promise<string> {
  return new Promise((done, fail) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result as string);
    reader.onerror = () => fail(reader.error!);
    reader.readAsDataURL(blob);
  });
}

/** Opens the person's pictures, or the camera of a phone. */
export function PictureButton({ name, icon, camera = false, onPicture }: { name: string; icon: React.ReactNode; camera?: boolean; onPicture: (file: File) => void }) {
  const input = useRef<HTMLInputElement>(null);
  const take = ({ target }: React.ChangeEvent<HTMLInputElement>) => {
    Array.from(target.files ?? []).forEach(onPicture);
    target.value = ""; // so that the same one can be chosen again
  };
  return (
    <>
      <input ref={input} type="file" accept="image/*" hidden onChange={take} {...(camera ? { capture: "environment" as const } : { multiple: true })} />
      <Button type="text" icon={icon} aria-label={name} title={name} onClick={() => input.current?.click()} />
    </>
  );
}

export function PictureList({ pictures, onRemove }: { pictures: Picture[]; onRemove?: (picture: Picture) => void }) {
  const t = useT();
  if (!pictures.length) return null;
  return (
    <ul className="pictures" aria-label={t("pictures")}>
      {pictures.map((picture, at) => {
        const { name, url } = picture;
        const remove = t("removeFile", { name });
        return (
          <li key={at}>
            <img src={url} alt={name} title={name} />
            {onRemove && <Button size="small" shape="circle" icon={<CloseOutlined aria-hidden />} aria-label={remove} title={remove} onClick={() => onRemove(picture)} />}
          </li>
        );
      })}
    </ul>
  );
}
