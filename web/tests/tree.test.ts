import { describe, expect, it } from "vitest";
import type { UserMessage } from "../src/store/messages";
import { append, branch, EMPTY, lineage, linear, path, place, remove, ROOT, step, update, type Tree } from "../src/store/tree";

const said = (text: string): UserMessage => ({ role: "user", text, files: [], created: 0 });
const shown = (tree: Tree) => path(tree).map((node) => node.id).join("");

/** a ─ b ─ c, with B beside b and behind B d. */
function forked(): Tree {
  const straight = ["a", "b", "c"].reduce((tree, id, at, ids) => append(tree, ids[at - 1] ?? ROOT, id, said(id)), EMPTY);
  return append(branch(straight, "b", "B", said("B")), "B", "d", said("d"));
}

describe("a message tree", () => {
  it("shows what came last", () => {
    expect(shown(EMPTY)).toBe("");
    expect(shown(forked())).toBe("aBd");
  });

  it("switches to an alternative with all behind it, and back", () => {
    const first = step(forked(), "B", -1);
    expect(shown(first)).toBe("abc");
    expect(shown(step(first, "b", 1))).toBe("aBd");
  });

  it("stays where it is at either end", () => {
    expect(shown(step(forked(), "B", 1))).toBe("aBd");
    expect(shown(step(forked(), "B", -5))).toBe("abc");
  });

  it("counts alternatives, of the first message too", () => {
    expect(place(forked(), "B")).toEqual({ index: 1, count: 2 });
    expect(place(forked(), "d")).toEqual({ index: 0, count: 1 });
    expect(place(branch(forked(), "a", "A", said("A")), "A")).toEqual({ index: 1, count: 2 });
  });

  it("forgets a message with all behind it, and shows its neighbour", () => {
    const without = remove(forked(), "B");
    expect(shown(without)).toBe("abc");
    expect(Object.keys(without.nodes).sort()).toEqual(["a", "b", "c"]);
    expect(shown(remove(forked(), "b"))).toBe("aBd");
    expect(remove(forked(), "a")).toMatchObject(EMPTY);
  });

  it("tells how a message came about, shown or not", () => {
    expect(lineage(forked(), "c").map((node) => node.id)).toEqual(["a", "b", "c"]);
  });

  it("becomes a line of its own where it is forked", () => {
    const line = linear(lineage(forked(), "b"));
    expect(shown(line)).toBe("ab");
    expect(Object.keys(line.nodes)).toHaveLength(2);
  });

  it("is never changed in place", () => {
    const before = forked();
    const copy = structuredClone(before);
    append(before, "d", "e", said("e"));
    update(before, "d", () => said("x"));
    step(before, "B", -1);
    remove(before, "a");
    expect(before).toEqual(copy);
  });
});
