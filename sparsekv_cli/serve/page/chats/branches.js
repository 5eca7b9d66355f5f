// The branches of a conversation. Its messages are the shown path. Where it forks, the first
// message of the path's rest has fork: {at, tails}. A tail is a list of messages, which may fork
// again. tails[at], the rest of the path, is null.

// Takes away the messages from a place on, and keeps them as a branch. Returns the fork for the
// message that comes there.
export function fork(chat, place) {
  const tail = chat.messages.splice(place), [first] = tail;
  const found = first.fork ?? { at: 0, tails: [null] };
  delete first.fork;
  found.tails[found.at] = tail;
  found.at = found.tails.push(null) - 1;
  return found;
}

// Shows the branch that is so many steps away from a message's own. Returns whether there is one.
export function turn(chat, message, steps) {
  const place = chat.messages.indexOf(message), found = message.fork;
  const to = found ? found.at + steps : -1;
  if (place < 0 || !found?.tails[to]) return false;
  const tail = found.tails[to];
  delete message.fork;
  found.tails[found.at] = chat.messages.splice(place);
  found.tails[to] = null;
  found.at = to;
  tail[0].fork = found;
  chat.messages = chat.messages.concat(tail);
  return true;
}

// The messages of all branches.
export function allMessages({ messages }) {
  const found = [], lists = [messages];
  while (lists.length) {
    for (const message of lists.pop()) {
      found.push(message);
      for (const tail of message.fork?.tails ?? []) if (tail) lists.push(tail);
    }
  }
  return found;
}
