/** Pastes that are too long for the field to write in. */

const LONG_CHARACTERS = 4000;
const LONG_LINES = 60;

/** Whether a pasted text becomes a file. */
export function isLong(text: string): boolean {
  return text.length >= LONG_CHARACTERS || text.split("\n").length > LONG_LINES;
}

/** "pasted.txt", then "pasted-2.txt" and so on. */
export function freeName(name: string, files: { name: string }[]): string {
  const [, stem, ending] = /^(.*?)(\.\w+)?$/.exec(name)!;
  const names = files.map((file) => file.name);
  let free = name;
  for (let number = 2; names.includes(free); number++) free = `${stem}-${number}${ending ?? ""}`;
  return free;
}
