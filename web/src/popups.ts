/** Where popups are put: into the landmark that opens them, so that screen readers find them there. */

export function inMain(opener: HTMLElement): HTMLElement {
  return opener.closest<HTMLElement>("main") ?? document.body;
}

export function inSide(opener: HTMLElement): HTMLElement {
  return opener.closest<HTMLElement>(".side") ?? document.body;
}
