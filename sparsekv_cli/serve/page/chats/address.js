// The address of a conversation: #/c/ID. It never reaches the server.

const PREFIX = "#/c/";

// The id in the page's address, or null.
export const addressed = () =>
  (location.hash.startsWith(PREFIX) ? location.hash.slice(PREFIX.length) : null);

// Goes to a conversation's address; null: that of a new one. adds: a page for the Back button.
export function goTo(id, adds) {
  if (addressed() === id) return;
  const address = id === null ? location.pathname + location.search : PREFIX + id;
  if (adds) history.pushState(null, "", address);
  else history.replaceState(null, "", address);
}

// Calls told(id) when somebody goes back or forward, or changes the address.
export function watchAddress(told) {
  addEventListener("popstate", () => told(addressed()));
}
