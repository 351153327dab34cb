/** Models write formulas as $x$, \(x\), $$x$$ and \[x\]; remark-math is given the one form that prices do not have, $$x$$. */

// Code first, so that nothing in it is taken for a formula; a fence that is still open reaches to the end.
const CODE = /(?<fence>^ {0,3}(?<mark>`{3,}|~{3,})[^\n]*(?:\n[\s\S]*?(?:^ {0,3}\k<mark>[`~]*[ \t]*$|$(?![\s\S]))|$(?![\s\S])))|(?<ticks>`+)[^`](?:[\s\S]*?[^`])??\k<ticks>(?!`)/;
const BLOCK = /\\\[(?<block>[\s\S]+?)\\\]/;
const BRACKETED = /\\\((?<bracketed>[\s\S]+?)\\\)/;
const DOUBLE = /\$\$(?<double>[\s\S]+?)\$\$/;
/** As pandoc has it: no space inside of the marks, and no digit behind them. */
const SINGLE = /(?<![\\$])\$(?<single>(?![\s$])(?:\\.|[^$\\\n])*?(?<![\s\\]))\$(?![\d$])/;
const ANY = new RegExp([CODE, BLOCK, BRACKETED, DOUBLE, SINGLE].map((one) => one.source).join("|"), "gm");

export function markFormulas(text: string): string {
  return text.replace(ANY, (whole: string, ...found: unknown[]) => {
    const at = found.at(-3) as number;
    const groups = found.at(-1) as Record<string, string | undefined>;
    const inline = groups.bracketed ?? groups.single;
    if (inline !== undefined) return `$$${inline}$$`;
    if (groups.block !== undefined) return `\n$$\n${groups.block.trim()}\n$$\n`;
    if (groups.double !== undefined && !isInTable(text, at)) return `\n$$\n${groups.double.trim()}\n$$\n`;
    return whole;
  });
}

/** A row of a table is one line, in which a formula cannot stand by itself. */
function isInTable(text: string, at: number): boolean {
  return /^[ \t]*\|/.test(text.slice(text.lastIndexOf("\n", at - 1) + 1, at));
}
