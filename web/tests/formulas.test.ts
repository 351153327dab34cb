import { describe, expect, it } from "vitest";
import { markFormulas } from "../src/chat/formulas";

describe("markFormulas", () => {
  it.each([
    ["so $x^2$ is", "so $$x^2$$ is"],
    ["so \\(x^2\\) is", "so $$x^2$$ is"],
    ["so \\[x^2\\] is", "so \n$$\nx^2\n$$\n is"],
    ["$$\nx\n$$", "\n$$\nx\n$$\n"],
    ["$$x^2$$", "\n$$\nx^2\n$$\n"],
    ["so:\n$$x^2$$\nis", "so:\n\n$$\nx^2\n$$\n\nis"],
    ["| a | $$x$$ |", "| a | $$x$$ |"],
    ["it costs $5 and not $10", "it costs $5 and not $10"],
    ["a $ b $ c", "a $ b $ c"],
    ["`$x$` and `` \\(x\\) ``", "`$x$` and `` \\(x\\) ``"],
    ["```sh\necho $HOME $x$\n```\n$y$", "```sh\necho $HOME $x$\n```\n$$y$$"],
    ["```sh\necho $a$ is still being written", "```sh\necho $a$ is still being written"],
    ["\\$5 and $n$", "\\$5 and $$n$$"],
  ])("%j", (text, marked) => expect(markFormulas(text)).toBe(marked));
});
