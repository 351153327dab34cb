import { expect, it } from "vitest";
import { decodeText } from "../src/chat/textFiles";

function utf16(text: string, little: boolean, mark = ""): Uint8Array {
  const units = Array.from({ length: (mark + text).length }, (_, at) => (mark + text).charCodeAt(at));
  return Uint8Array.from(units.flatMap((unit) => (little ? [unit & 255, unit >> 8] : [unit >> 8, unit & 255])));
}

it.each([
  ["UTF-8", new TextEncoder().encode("Grüße 你好 😀"), "Grüße 你好 😀", null],
  ["UTF-8 with a mark", new TextEncoder().encode("\ufeffa"), "a", null],
  ["UTF-16 with a mark", utf16("你好 😀", true, "\ufeff"), "你好 😀", null],
  ["big-endian UTF-16 with a mark", utf16("你好", false, "\ufeff"), "你好", null],
  ["UTF-16 without a mark", utf16("Grüße, 10 €\r\n", true), "Grüße, 10 €\r\n", "UTF-16LE"],
  ["big-endian UTF-16 without a mark", utf16("Grüße", false), "Grüße", "UTF-16BE"],
  ["Latin-1", Uint8Array.of(0x47, 0x72, 0xfc, 0xdf, 0x65), "Grüße", "Latin-1 (Windows-1252)"],
  ["nothing", new Uint8Array(), "", null],
])("reads %s", (_, bytes, text, guessed) => expect(decodeText(bytes)).toEqual({ text, guessed }));

it.each([
  ["a zero", Uint8Array.of(0, 0xff)],
  ["an archive", Uint8Array.of(0x50, 0x4b, 3, 4, 0x14, 0, 8, 8, 0x9c, 0xb5)],
  ["controls", Uint8Array.of(0xff, 1, 2, 3)],
  ["half a UTF-16 character", Uint8Array.of(0xff, 0xfe, 0, 0xd8)],
])("reads no text in %s", (_, bytes) => expect(decodeText(bytes)).toBeNull());
