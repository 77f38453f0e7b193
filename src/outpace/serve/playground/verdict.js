// What two texts of one prompt say about speed.
const GROUPS = 8; // into which a text's rounds are put to see how far its speed varies
const LEAST = 4;
const UNSURE = 1.1; // two runs one after the other differ as much on a machine with other work

export function verdictOn(fast, plain, about) {
  const same = fast.tokens.map((t) => t.id).join() === plain.tokens.map((t) => t.id).join();
  const another = about?.coupled || Number(fast.asked.temperature) === 0
    ? "Another text"
    : "Another text of the same distribution (--verify coupled writes the same one)";
  const text = same ? `The same ${fast.tokens.length} tokens` : another;
  if (!fast.rounds.some((round) => round.nodes.length)) return `${text}; nothing was drafted.`;
  const ratio = fast.rate / plain.rate;
  if (!isSure(ratio, fast, plain)) return `${text}; the speeds differ by no more than noise.`;
  return `${text}, ${ratio.toFixed(2)} times as fast.`;
}

// Whether a ratio is distinguishable from 1, by how far the parts of both texts differ among themselves.
export function isSure(ratio, fast, plain) {
  const errors = [fast, plain].map((pane) => errorOf(pane.rounds));
  if (errors.some(Number.isNaN)) return false;
  return Math.abs(Math.log(ratio)) > Math.max(Math.log(UNSURE), 2 * Math.hypot(...errors));
}

// The standard error of the logarithm of a text's speed; NaN where it has too few rounds.
function errorOf(rounds) {
  if (rounds.length < LEAST) return NaN;
  const count = Math.min(GROUPS, rounds.length);
  const logs = [];
  for (let at = 0; at < count; at++) {
    const group = rounds.slice((at * rounds.length) / count | 0, ((at + 1) * rounds.length) / count | 0);
    const tokens = group.reduce((sum, round) => sum + round.tokens.length, 0);
    logs.push(Math.log(tokens / group.reduce((sum, round) => sum + round.seconds, 0)));
  }
  const mean = logs.reduce((a, b) => a + b) / count;
  const spread = logs.reduce((sum, log) => sum + (log - mean) ** 2, 0) / (count - 1);
  return Math.sqrt(spread / count);
}
