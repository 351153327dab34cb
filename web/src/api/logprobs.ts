import type { Alternative, Token } from "../store/messages";

interface WireAlternative {
  token: string;
  logprob: number;
}

export interface WireToken extends WireAlternative {
  top_logprobs: WireAlternative[];
}

/** The server names a part of a character, which has no text of its own, by its bytes: \xe2\x80. */
function alternative({ token, logprob }: WireAlternative): Alternative {
  return { text: token, logprob };
}

export function tokens(wire: WireToken[] | null | undefined): Token[] {
  return (wire ?? []).map((token) => ({ ...alternative(token), top: token.top_logprobs.map(alternative) }));
}
