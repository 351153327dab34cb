/** What the Enter key does where a message is written. */

interface Press {
  key: string;
  shiftKey: boolean;
  isComposing: boolean;
}

/** Whether this key sends. On a phone, whose keyboard has no Shift+Enter, Enter begins a new line and the button sends. */
export function sends(press: Press, touches: boolean): boolean {
  return press.key === "Enter" && !press.shiftKey && !press.isComposing && !touches;
}

/** Whether a finger is what this device is pointed at with. */
export function isTouched(): boolean {
  return matchMedia("(pointer: coarse)").matches;
}
