import type { Alternative, Token } from "../store/messages";

interface WireAlternative {
  token: string;
  logprob: number;
  bytes: number[] | null;
}

export interface WireToken extends WireAlternative {
  top_logprobs: WireAlternative[];
}

/** A part of a character has no text of its own: it is shown as its bytes. */
function alternative({ token, logprob, bytes }: WireAlternative): Alternative {
  const text = token.includes("\ufffd") && bytes ? bytes.map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("") : token;
  return { text, logprob };
}

export function tokens(wire: WireToken[] | null | undefined): Token[] {
  return (wire ?? []).map((token) => ({ ...alternative(token), top: token.top_logprobs.map(alternative) }));
}
