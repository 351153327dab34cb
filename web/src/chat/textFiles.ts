/** The text of files, whichever encoding it is in. */

export const MAX_FILE_BYTES = 2 * 1024 * 1024;
export const MAX_FILE_TEXT = "2 MB";

export interface ReadText {
  text: string;
  /** Which encoding its bytes were taken for, if they say nothing of it themselves and are not UTF-8. */
  guessed: string | null;
}

/** Characters that no text has: controls other than tab, line and page breaks and escape. */
// eslint-disable-next-line no-control-regex
const CONTROLS = /[\0-\x08\x0b\x0e-\x1a\x1c-\x1f\x7f-\x9f]/;

/** UTF-8, UTF-16, or Latin-1 as Windows extends it; null where the bytes are no text in any of them. */
export function decodeText(bytes: Uint8Array): ReadText | null {
  const utf16 = byteOrder(bytes);
  if (utf16) return plain(utf16.encoding, bytes, utf16.marked ? null : utf16.encoding.toUpperCase());
  return plain("utf-8", bytes, null) ?? plain("windows-1252", bytes, "Latin-1 (Windows-1252)");
}

function plain(encoding: string, bytes: Uint8Array, guessed: string | null): ReadText | null {
  try {
    const text = new TextDecoder(encoding, { fatal: true }).decode(bytes);
    const strange = encoding === "utf-8" ? text.includes("\0") : CONTROLS.test(text);
    return strange ? null : { text, guessed };
  } catch (error) {
    if (error instanceof TypeError) return null; // no text in this encoding
    throw error;
  }
}

/** Which UTF-16 the bytes are, by their mark, or because most of it is ASCII with a zero at every second byte. */
function byteOrder(bytes: Uint8Array): { encoding: string; marked: boolean } | null {
  if (bytes[0] === 0xff && bytes[1] === 0xfe) return { encoding: "utf-16le", marked: true };
  if (bytes[0] === 0xfe && bytes[1] === 0xff) return { encoding: "utf-16be", marked: true };
  let [little, big] = [0, 0];
  for (let at = 0; at + 1 < bytes.length; at += 2) {
    if (bytes[at + 1] === 0 && isASCIIText(bytes[at]!)) little++;
    if (bytes[at] === 0 && isASCIIText(bytes[at + 1]!)) big++;
  }
  const most = bytes.length / 4;
  return little > most ? { encoding: "utf-16le", marked: false } : big > most ? { encoding: "utf-16be", marked: false } : null;
}

function isASCIIText(byte: number): boolean {
  return (byte >= 0x20 && byte < 0x7f) || byte === 0x09 || byte === 0x0a || byte === 0x0d;
}

export async function readTextFile(file: Blob): Promise<ReadText | null> {
  return decodeText(new Uint8Array(await file.arrayBuffer()));
}
