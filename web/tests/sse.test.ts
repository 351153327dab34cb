import { describe, expect, it } from "vitest";
import { EventParser, readEvents, type ServerEvent } from "../src/api/sse";

const STREAM = ': keep-alive\n\nevent: a\ndata: {"x":1}\n\ndata: first\r\ndata: second\r\n\r\ndata\n\nid: 7\ndata:no space\n\nevent: lost\n\ndata: cut off';
const EVENTS = [
  { event: "a", data: '{"x":1}' },
  { event: "message", data: "first\nsecond" },
  { event: "message", data: "" },
  { event: "message", data: "no space" },
];

describe("EventParser", () => {
  it("reads comments, names, several lines of data and every kind of line end", () => {
    expect(new EventParser().push(STREAM)).toEqual(EVENTS);
  });

  it.each([1, 2, 3, 7])("gives the same when the text comes in pieces of %i", (size) => {
    const parser = new EventParser();
    const pieces = STREAM.match(new RegExp(`[^]{1,${size}}`, "g"))!;
    expect(pieces.flatMap((piece) => parser.push(piece))).toEqual(EVENTS);
  });
});

describe("readEvents", () => {
  it("joins characters that were cut between chunks", async () => {
    const bytes = new TextEncoder().encode("data: größer 数\n\n");
    const body = new ReadableStream<Uint8Array>({
      start(controller) {
        for (const byte of bytes) controller.enqueue(Uint8Array.of(byte));
        controller.close();
      },
    });
    const found: ServerEvent[] = [];
    for await (const event of readEvents(body)) found.push(event);
    expect(found).toEqual([{ event: "message", data: "größer 数" }]);
  });
});
