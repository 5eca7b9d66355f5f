// Conversations in the browser's own database. Without one they last until the page is closed.

const NAME = "sparsekv-cli";
let database = null, others = null;  // others: the same page in other tabs

function whole(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

const objects = (mode) => database.transaction("chats", mode).objectStore("chats");

// Returns the conversations, and why they are not kept if they are not.
export async function open() {
  try {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore("chats", { keyPath: "id" });
    database = await whole(request);
    database.onversionchange = () => database.close();
    others = new BroadcastChannel(NAME);
    return { chats: await whole(objects("readonly").getAll()), error: null };
  } catch (error) {
    database = null;
    return { chats: [], error };
  }
}

// Keeps a conversation, but not its name if another tab has given it a newer one.
export async function put(chat) {
  if (!database) return;
  const kept = objects("readwrite"), before = kept.get(chat.id);
  before.onsuccess = () => {
    takeName(chat, before.result);
    kept.put(chat);
  };
  await changed(chat.id, before);
}

// named: the time at which somebody gave the name.
export function takeName(chat, other) {
  if ((other?.named ?? 0) > (chat.named ?? 0))
    Object.assign(chat, { title: other.title, named: other.named });
}

// Keeps conversations that are new, all or none.
export async function putAll(chats) {
  if (!database || !chats.length) return;
  const kept = objects("readwrite");
  await changed(chats.map(({ id }) => id), chats.map((chat) => kept.put(chat)).at(-1));
}

export async function remove(id) {
  if (database) await changed(id, objects("readwrite").delete(id));
}

// A request may succeed, and its transaction still fail: the disk is full, say.
async function changed(ids, { transaction }) {
  await new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error);
  });
  for (const id of [ids].flat()) others.postMessage(id);
}

// Calls told(id, chat) when another tab has changed a conversation; chat: undefined if it is gone.
export function watch(told) {
  if (!database) return;
  others.onmessage = async ({ data: id }) => told(id, await whole(objects("readonly").get(id)));
}
