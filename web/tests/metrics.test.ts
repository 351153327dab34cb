import { expect, it } from "vitest";
import { parseMetrics, total } from "../src/api/metrics";

it("adds up the samples that have a name and labels", () => {
  const samples = parseMetrics('# HELP a b\na{kind="x",m="q\\"uo"} 1.5\na{kind="y",m=""} 2\nb 1e+06\n');
  expect(samples[0]).toEqual({ name: "a", labels: { kind: "x", m: 'q\\"uo' }, value: 1.5 });
  expect([total(samples, "a"), total(samples, "a", { kind: "y" }), total(samples, "b"), total(samples, "c")]).toEqual([3.5, 2, 1_000_000, 0]);
});
