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

export function go(route: Route): void {
  location.hash = hrefOf(route);
}

function subscribe(listener: () => void): () => void {
  addEventListener("hashchange", listener);
  return () => removeEventListener("hashchange", listener);
}

export function useRoute(): Route {
  return parse(useSyncExternalStore(subscribe, () => location.hash));
}
