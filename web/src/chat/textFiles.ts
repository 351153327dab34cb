export const MAX_FILE_BYTES = 2 * 1024 * 1024;
export const MAX_FILE_TEXT = "2 MB";

/** The file's text; null where its bytes are not UTF-8, or hold a NUL, which no text has. */
export async function readTextFile(file: Blob): Promise<string | null> {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}
