/** Where the page stands: #/ is a new conversation, #/c/ID one of the list, #/server the server. */

import { useSyncExternalStore } from "react";

export type Route = { page: "new" } | { page: "chat"; id: string } | { page: "server" };

export function parse(hash: string): Route {
  const [, first, second] = hash.replace(/^#/, "").split("/");
  if (first === "server") return { page: "server" };
  return first === "c" && second ? { page: "chat", id: second } : { page: "new" };
}

export function hrefOf(route: Route): string {
  return route.page === "chat" ? `#/c/${route.id}` : route.page === "server" ? "#/server" : "#/";
}

const listeners = new Set<() => void>();

/** Show this now. A changed location.hash is told by an event some time later, until when the old view takes what is typed. */
export function go(route: Route): void {
  const href = hrefOf(route);
  if (location.hash !== href) history.pushState(null, "", href);
  for (const listener of listeners) listener();
}

/** A click on one of the page's own links. */
function follow(event: MouseEvent): void {
  const link = (event.target as Element).closest("a");
  const href = link?.getAttribute("href") ?? "";
  const elsewhere = event.button !== 0 || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey || link?.target;
  if (!href.startsWith("#/") || elsewhere || event.defaultPrevented) return;
  event.preventDefault();
  go(parse(href));
}

function subscribe(listener: () => void): () => void {
  listeners.add(listener);
  addEventListener("hashchange", listener);
  document.addEventListener("click", follow);
  return () => {
    listeners.delete(listener);
    removeEventListener("hashchange", listener);
    if (listeners.size === 0) document.removeEventListener("click", follow);
  };
}

export function useRoute(): Route {
  return parse(useSyncExternalStore(subscribe, () => location.hash));
}
