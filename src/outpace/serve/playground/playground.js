// The page of `outpace serve`: streams a text and shows how each of its tokens came.
const $ = (id) => document.getElementById(id);
let about = null; // what the server says of itself, to those who have a key
let running = null; // the controller that stops what runs
let shown = null; // the pane whose rounds are drawn, and which of them is

async function introduce() {
  const answer = await fetch("playground.json", { headers: access() }).catch(() => null);
  about = (await answer?.json().catch(() => null)) ?? null;
  if (about?.model) {
    const how = about.method === "none" ? "no drafter" : `${about.method}, rule ${about.rule}`;
    $("about").textContent = `${about.model} · ${how} · ${about.description}`;
    document.querySelector("[value=chat]").disabled = !about.chat;
  } else {
    $("about").textContent = answer ? "give the API key of this server" : "the server does not answer";
    $("access").open = true;
  }
}

function access() {
  const key = document.getElementById("key")?.value;
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// -- one text ---------------------------------------------------------------------------------

class Pane {
  constructor(title, speculative) {
    this.speculative = speculative;
    this.rounds = [];
    this.seconds = 0; // of all rounds
    this.tokens = []; // {text, origin, round}
    this.laws = [];
    this.box = add($("panes"), "article", "pane");
    const head = add(this.box, "header");
    add(head, "h2", "", title);
    this.figures = add(head, "span", "figures", "waiting …");
    this.text = add(this.box, "div", "text");
    this.text.setAttribute("aria-live", "off");
    this.text.tabIndex = 0;
    this.text.setAttribute("role", "listbox");
    this.text.setAttribute("aria-label", `${title}: tokens; arrow keys move, Enter shows the round`);
    this.at = -1;
    this.text.addEventListener("keydown", (event) => this.move(event));
  }

  async play(signal) {
    const chat = document.querySelector("[name=mode]:checked").value === "chat";
    const body = {
      stream: true,
      max_tokens: Number($("tokens").value),
      temperature: Number($("temperature").value),
      seed: Number($("seed").value),
      speculative: this.speculative,
      outpace: { trace: true },
    };
    Object.assign(body, chat
      ? { messages: [{ role: "user", content: $("prompt").value }], logprobs: true, top_logprobs: 5 }
      : { prompt: $("prompt").value, logprobs: 5 });
    const answer = await fetch(chat ? "v1/chat/completions" : "v1/completions", {
      method: "POST", signal, body: JSON.stringify(body),
      headers: { "Content-Type": "application/json", ...access() },
    });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    for await (const event of events(answer.body)) this.take(event);
  }

  take(event) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices[0];
    if (choice?.logprobs) this.laws.push(...lawsOf(choice.logprobs));
    for (const round of event.outpace?.rounds ?? []) {
      this.rounds.push(round);
      this.seconds += round.seconds;
      for (const token of round.tokens) this.show(token, this.rounds.length - 1);
    }
    const metrics = event.outpace?.metrics;
    this.count(metrics);
    if (metrics) this.text.setAttribute("aria-busy", "false");
  }

  show(token, round) {
    const index = this.tokens.push({ ...token, round }) - 1;
    const span = add(this.text, "span", `token ${token.origin}`, token.text);
    span.id = `token-${this.speculative}-${index}`;
    span.setAttribute("role", "option");
    span.addEventListener("pointerenter", () => this.tell(index, span));
    span.addEventListener("pointerleave", () => { $("tip").hidden = true; });
    span.addEventListener("click", () => this.choose(index));
  }

  count(metrics) {
    const rate = this.seconds ? this.tokens.length / this.seconds : 0;
    const perPass = this.rounds.length ? this.tokens.length / this.rounds.length : 0;
    this.rate = rate;
    this.figures.textContent =
      `${rate.toFixed(0)} tokens/s · ${this.tokens.length} tokens · ${perPass.toFixed(2)} a pass` + (metrics ? "" : " …");
  }

  tell(index, span) {
    const laws = this.laws[index];
    const tip = $("tip");
    tip.replaceChildren();
    add(tip, "div", "", `${this.tokens[index].origin}, round ${this.tokens[index].round + 1}`);
    if (laws) {
      const table = add(tip, "table");
      for (const [text, logprob] of laws.top) {
        const row = add(table, "tr", text === laws.token ? "own" : "");
        add(row, "td", "", JSON.stringify(text));
        add(row, "td", "", `${(100 * Math.exp(logprob)).toFixed(1)} %`);
      }
    }
    tip.hidden = false;
    const at = span.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - tip.offsetWidth - 8))}px`;
    const below = at.bottom + 8 + tip.offsetHeight < innerHeight;
    tip.style.top = `${below ? at.bottom + 8 : at.top - tip.offsetHeight - 8}px`;
  }

  move(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") $("tip").hidden = true;
    if (event.key === "Enter" && this.at >= 0) this.choose(this.at);
    if (!step || !this.tokens.length) return;
    event.preventDefault();
    this.at = Math.max(0, Math.min(this.tokens.length - 1, this.at + step));
    const span = this.text.children[this.at];
    this.mark(span);
    this.text.setAttribute("aria-activedescendant", span.id);
    this.tell(this.at, span);
  }

  mark(span) {
    document.querySelectorAll(".chosen").forEach((other) => other.classList.remove("chosen"));
    span.classList.add("chosen");
  }

  choose(index) {
    this.at = index;
    this.mark(this.text.children[index]);
    drawRound(this, this.tokens[index].round);
    $("tree-box").scrollIntoView({ block: "nearest" });
  }
}

async function* events(stream) {
  const decoder = new TextDecoder();
  let held = "";
  for await (const part of chunks(stream)) {
    held += decoder.decode(part, { stream: true });
    const lines = held.split("\n\n");
    held = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}

async function* chunks(stream) { // not every browser can iterate over a stream
  const reader = stream.getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
}

function lawsOf(found) {
  if (found.content) {
    return found.content.map((one) => ({
      token: one.token, top: one.top_logprobs.map((other) => [other.token, other.logprob]),
    }));
  }
  return found.tokens.map((token, at) => ({ token, top: Object.entries(found.top_logprobs[at]) }));
}

// -- pictures ---------------------------------------------------------------------------------

function drawDepths(pane) {
  const drafted = [], kept = [];
  for (const round of pane.rounds) {
    const depths = depthsOf(round);
    const deepest = Math.max(0, ...depths);
    for (let depth = 0; depth < deepest; depth++) {
      drafted[depth] = (drafted[depth] ?? 0) + 1;
      kept[depth] = (kept[depth] ?? 0) + (depth < round.path.length ? 1 : 0);
    }
  }
  $("depths").replaceChildren();
  $("depths-box").hidden = !drafted.length;
  drafted.forEach((count, depth) => {
    const share = kept[depth] / count;
    const row = add($("depths"), "div", "depth");
    add(row, "span", "", String(depth + 1));
    const svg = draw(row, "svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" });
    draw(svg, "rect", { class: "track", width: 100, height: 10 });
    draw(svg, "rect", { class: "bar", width: 100 * share, height: 10 });
    add(row, "span", "", `${(100 * share).toFixed(0)} % of ${count}`);
  });
}

function depthsOf(round) {
  const depths = [0];
  for (const node of round.nodes) depths.push(depths[node.parent] + 1);
  return depths;
}

function drawRound(pane, number) {
  shown = { pane, number };
  const round = pane.rounds[number];
  $("tree-box").hidden = !round;
  if (!round) return;
  const title = `Round ${number + 1} of ${pane.rounds.length}`;
  $("tree-title").textContent = title;
  Object.assign($("round"), { max: pane.rounds.length, value: number + 1 });
  const texts = round.tokens.map((token) => JSON.stringify(token.text)).join(" ");
  $("round-words").textContent = round.nodes.length
    ? `${round.nodes.length} drafted, ${round.path.length} kept; emitted: ${texts}`
    : `nothing drafted; emitted: ${texts}`;
  $("tree").replaceChildren(treeOf(round, title));
}

function treeOf(round, title) {
  const wide = 112, high = 34, gap = 40;
  const last = round.tokens[round.tokens.length - 1];
  const nodes = [{ text: "root", parent: -1, kind: "plain", kept: true }];
  round.nodes.forEach((node, index) => {
    const kept = round.path.includes(index + 1);
    nodes.push({ ...node, kind: kept ? "accepted" : "rejected", kept });
  });
  if (last && last.origin !== "accepted") {
    const end = round.path.length ? round.path[round.path.length - 1] : 0;
    nodes.push({ text: last.text, parent: end, kind: last.origin, kept: true });
  }
  const children = nodes.map(() => []);
  nodes.forEach((node, index) => { if (node.parent >= 0) children[node.parent].push(index); });
  let rows = 0;
  const place = (index, depth) => { // leaves one below the other, parents beside their first child
    const node = nodes[index];
    node.depth = depth;
    if (!children[index].length) node.row = rows++;
    children[index].forEach((child) => place(child, depth + 1));
    if (children[index].length) node.row = nodes[children[index][0]].row;
  };
  place(0, 0);
  const width = (Math.max(...nodes.map((node) => node.depth)) + 1) * (wide + gap) - gap + 4;
  const svg = draw(null, "svg", { width, height: rows * (high + 10) + 4, role: "img", "aria-label": title });
  const x = (node) => 2 + node.depth * (wide + gap), y = (node) => 2 + node.row * (high + 10);
  for (const node of nodes.slice(1)) {
    const from = nodes[node.parent], [a, b] = [x(from) + wide, y(from) + high / 2];
    const [c, d] = [x(node), y(node) + high / 2];
    draw(svg, "path", { class: node.kept ? "edge kept" : "edge", d: `M${a} ${b} C${a + gap / 2} ${b} ${c - gap / 2} ${d} ${c} ${d}` });
  }
  for (const node of nodes) {
    draw(svg, "rect", { class: `box ${node.kind}`, x: x(node), y: y(node), width: wide, height: high, rx: 6 });
    const text = node.parent < 0 ? "…" : JSON.stringify(node.text);
    const label = draw(svg, "text", { x: x(node) + 8, y: y(node) + 22 });
    label.textContent = text.length > 12 ? `${text.slice(0, 11)}…` : text;
    draw(label, "title", {}).textContent = `${text} ${node.kind}`;
  }
  return svg;
}

// -- the page ---------------------------------------------------------------------------------

async function run() {
  running?.abort();
  const mine = running = new AbortController();
  $("panes").replaceChildren();
  $("verdict").textContent = "";
  $("message").hidden = $("depths-box").hidden = $("tree-box").hidden = true;
  $("stop").disabled = false;
  const choice = $("speculative").value;
  const fast = new Pane("Speculative", choice === "auto" ? "auto" : Number(choice));
  const panes = $("beside").checked ? [fast, new Pane("Plain", "off")] : [fast];
  try {
    for (const pane of panes) await pane.play(mine.signal); // one by one: each has the machine alone
    compare(panes);
  } catch (error) {
    if (error.name !== "AbortError" && running === mine) {
      $("message").textContent = error.message;
      $("message").hidden = false;
    }
  }
  if (running !== mine) return;
  $("stop").disabled = true;
  drawDepths(fast);
  const first = fast.rounds.findIndex((round) => round.nodes.length);
  drawRound(fast, Math.max(0, first));
}

function compare([fast, plain]) {
  if (!plain) return;
  const same = fast.tokens.map((t) => t.id).join() === plain.tokens.map((t) => t.id).join();
  const faster = `${(fast.rate / plain.rate).toFixed(2)} times as fast`;
  const greedy = Number($("temperature").value) === 0;
  const why = greedy || about?.coupled ? "" : " (another text of the same law: start the server with --verify coupled for the same text)";
  $("verdict").textContent = same ? `The same ${fast.tokens.length} tokens, ${faster}.` : `Another text${why}, ${faster}.`;
}

function add(parent, kind, name = "", text = "") {
  const made = document.createElement(kind);
  made.className = name;
  made.textContent = text;
  parent.append(made);
  return made;
}

function draw(parent, kind, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  parent?.append(made);
  return made;
}

const turn = (step) => {
  const number = Math.max(0, Math.min(shown.pane.rounds.length - 1, shown.number + step));
  drawRound(shown.pane, number);
};
$("form").addEventListener("submit", (event) => { event.preventDefault(); run(); });
$("stop").addEventListener("click", () => running?.abort());
$("earlier").addEventListener("click", () => turn(-1));
$("later").addEventListener("click", () => turn(1));
$("round").addEventListener("input", () => drawRound(shown.pane, Number($("round").value) - 1));
$("key").addEventListener("change", introduce);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault(); // in a field, Enter would send the form as well
  run();
});
await introduce();
