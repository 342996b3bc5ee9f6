// Questions are searched by their words of content. The search takes each word as the beginning of a word: "i" of "how do
// I" would find "install", before the pages that the other words are about.
const SMALL = new Set(
  "a an and any are at be can could do does for from get how i if in is it its me my of on or should that the there this to use was what when where which who why will with work works would you your".split(" "),
);

function withoutSmallWords(query) {
  if (/["*~^+:]/.test(query)) return query; // The reader searches for a phrase, or uses the search's own signs.
  // Of `self.log` and `torch.compile`, the name is what pages are about.
  const words = query.split(/\s+/).map((word) => word.replace(/^(self|torch|hasten|L)\.(?=\w)/, ""));
  const rest = words.filter((word) => word.length > 1 && !SMALL.has(word.toLowerCase().replace(/[?.,!]+$/, "")));
  return rest.length ? rest.join(" ") : query;
}

const QUERY = 2; // The message of a page to the search worker that holds what was typed.
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  const isQuery = message?.type === QUERY && typeof message.data === "string";
  return post.call(this, isQuery ? { ...message, data: withoutSmallWords(message.data) } : message, ...rest);
};
