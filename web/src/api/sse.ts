/** Server-sent events, as https://html.spec.whatwg.org/multipage/server-sent-events.html parses them. */

import { APIError } from "./http";

export interface ServerEvent {
  event: string;
  data: string;
}

/** Takes text in pieces of any size; gives the events that each completes. */
export class EventParser {
  private rest = "";
  private event = "";
  private data: string[] = [];

  push(text: string): ServerEvent[] {
    const events: ServerEvent[] = [];
    this.rest += text;
    for (;;) {
      const end = this.rest.search(/[\r\n]/);
      if (end < 0 || (this.rest[end] === "\r" && end === this.rest.length - 1)) return events; // \n may follow
      const line = this.rest.slice(0, end);
      this.rest = this.rest.slice(end + (this.rest.startsWith("\r\n", end) ? 2 : 1));
      const event = this.line(line);
      if (event) events.push(event);
    }
  }

  private line(line: string): ServerEvent | null {
    if (line === "") {
      const event = this.data.length ? { event: this.event || "message", data: this.data.join("\n") } : null;
      this.event = "";
      this.data = [];
      return event;
    }
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "event") this.event = value;
    if (name === "data") this.data.push(value);
    return null;
  }
}

/** The events of a response's body. Throws APIError (status 0) where the connection breaks. */
export async function* readEvents(body: ReadableStream<Uint8Array>): AsyncGenerator<ServerEvent> {
  const parser = new EventParser();
  const reader = body.pipeThrough(new TextDecoderStream() as ReadableWritablePair<string, Uint8Array>).getReader();
  try {
    for (;;) {
      const { value, done } = await reader.read().catch(broken);
      if (done) return;
      yield* parser.push(value);
    }
  } finally {
    await reader.cancel().catch(() => {}); // an aborted stream refuses, and has ended already
  }
}

function broken(error: unknown): never {
  throw error instanceof TypeError ? new APIError(0, error.message) : error;
}
