/** localStorage as a browser has it: its keys are properties of it. */
export function storage(): Storage {
  const kept: Record<string, string> = {};
  const methods = {
    getItem: (key: string) => kept[key] ?? null,
    setItem: (key: string, value: string) => void (kept[key] = value),
    removeItem: (key: string) => void delete kept[key],
  };
  return new Proxy(methods, { ownKeys: () => Object.keys(kept), getOwnPropertyDescriptor: (_, key) => ({ value: kept[key as string], enumerable: true, configurable: true }) }) as unknown as Storage;
}
