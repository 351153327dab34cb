const WIDTH = 240;
const HEIGHT = 44;

/** The latest values at the right; the area reaches up to `top`, or to the largest value. */
export function Sparkline({ values, kept, label, top }: { values: number[]; kept: number; label: string; top?: number }) {
  const highest = Math.max(top ?? 0, ...values, 1e-9);
  const step = WIDTH / (kept - 1);
  const points = values.map((value, at) => `${(WIDTH - (values.length - 1 - at) * step).toFixed(1)},${(HEIGHT - 2 - (value / highest) * (HEIGHT - 4)).toFixed(1)}`);
  const first = (WIDTH - (values.length - 1) * step).toFixed(1);
  return (
    <svg className="spark" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label={label}>
      {points.length > 1 && <polygon points={`${first},${HEIGHT} ${points.join(" ")} ${WIDTH},${HEIGHT}`} />}
      <polyline points={points.join(" ")} vectorEffect="non-scaling-stroke" />
    </svg>
  );
}
