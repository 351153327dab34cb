import { useEffect, useState } from "react";
import { parseMetrics, total, type Sample } from "../api/metrics";
import { metricsText } from "../api/server";

export const EVERY_MS = 1000;
export const KEPT = 60;

export interface Moment {
  at: number;
  running: number;
  waiting: number;
  pages: number;
  pagesFree: number;
  generated: number;
  processed: number;
  lookups: number;
  hits: number;
  compiles: number;
  unforeseen: number;
  compileSeconds: number;
  pending: number;
  preemptions: number;
}

function moment(samples: Sample[], at: number): Moment {
  const own = (name: string, labels?: Record<string, string>) => total(samples, `jaxllm:${name}`, labels);
  return {
    at,
    running: own("num_requests_running"), waiting: own("num_requests_waiting"),
    pages: own("kv_pages"), pagesFree: own("kv_pages_free"),
    generated: own("generation_tokens_total"), processed: own("prompt_tokens_total"),
    lookups: own("prefix_cache_queries_total"), hits: own("prefix_cache_hits_total"),
    compiles: own("compiles_total"), unforeseen: own("compiles_total", { kind: "unforeseen" }), compileSeconds: own("compile_seconds_total"),
    pending: own("compiles_pending"), preemptions: own("num_preemptions_total"),
  };
}

/** /metrics once a second while the tab is shown; `failed` when the last time nothing came. */
export function useLive(): { moments: Moment[]; failed: boolean } {
  const [moments, setMoments] = useState<Moment[]>([]);
  const [failed, setFailed] = useState(false);
  useEffect(() => {
    let current = true;
    let timer: ReturnType<typeof setTimeout>;
    const look = async () => {
      if (!document.hidden) {
        try {
          const now = moment(parseMetrics(await metricsText()), Date.now());
          if (current) setMoments((before) => [...before, now].slice(-KEPT));
          if (current) setFailed(false);
        } catch {
          if (current) setFailed(true);
        }
      }
      if (current) timer = setTimeout(() => void look(), EVERY_MS);
    };
    void look();
    return () => {
      current = false;
      clearTimeout(timer);
    };
  }, []);
  return { moments, failed };
}

/** How fast a counter grew between each moment and the next. */
export function rates(moments: Moment[], of: (moment: Moment) => number): number[] {
  return moments.slice(1).map((moment, at) => Math.max(0, (1000 * (of(moment) - of(moments[at]!))) / Math.max(moment.at - moments[at]!.at, 1)));
}
