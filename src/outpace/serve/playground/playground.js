// The page of `outpace serve`: a conversation, or a text that goes on, and how its tokens came.
import { Pane } from "./pane.js";
import { add, drawDepths, quoted, treeOf } from "./pictures.js";
import { verdictOn } from "./verdict.js";

const $ = (id) => document.getElementById(id);
const CHAT = { empty: "Ask something. Colours show how each token of the answer came.", hint: "Ask something" };
const TEXT = { empty: "A text to continue. Colours show how each token came.", hint: "A text to continue" };
const STORY = "Once upon a time there was a little girl named Lily. She";

let about = null; // what the server says of itself, to those who have a key
let running = null; // the controller that stops what runs
let shown = null; // the pane whose rounds are drawn, and which of them is
let turns = []; // of the chat: {question, answer}
let follows = true; // whether the page scrolls to what comes

// -- the server -------------------------------------------------------------------------------

async function introduce() {
  const answer = await fetch("playground.json", { headers: access() }).catch(() => null);
  const known = about !== null;
  about = (await answer?.json().catch(() => null)) ?? null;
  if (!about?.model) {
    about = null;
    $("about").textContent = answer ? "give the API key of this server" : "the server does not answer";
    $("options").open = true;
    return;
  }
  const how = about.method === "none" ? "no drafter" : about.method;
  $("about").textContent = `${about.model} · ${how}`;
  $("description").textContent = `rule ${about.rule} · ${about.description}`;
  document.querySelector("[value=chat]").disabled = !about.chat;
  if (!known) document.querySelector(`[value=${about.chat ? "chat" : "prompt"}]`).checked = true;
  if (!known) begin();
}

function access() {
  const key = $("key").value;
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// -- the conversation -------------------------------------------------------------------------

const isChat = () => document.querySelector("[name=mode]:checked").value === "chat";

// Begins anew, in the mode that is chosen.
function begin() {
  running?.abort();
  running = null;
  busy(false);
  turns = [];
  const words = isChat() ? CHAT : TEXT;
  $("talk").replaceChildren();
  add($("talk"), "p", "quiet", words.empty).id = "empty";
  $("prompt").placeholder = words.hint;
  $("prompt").value = isChat() ? "" : STORY;
  $("prompt").classList.toggle("raw", !isChat());
  $("system-box").hidden = !isChat();
  $("rounds").hidden = $("message").hidden = true;
  $("prompt").focus({ preventScroll: true });
}

function asked(question, speculative) {
  const body = {
    stream: true,
    max_tokens: Number($("tokens").value),
    temperature: Number($("temperature").value),
    seed: Number($("seed").value),
    speculative,
    outpace: { trace: true },
  };
  if (!isChat()) return { ...body, prompt: question, logprobs: 5 };
  const system = $("system").value.trim();
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    messages.push({ role: "user", content: turn.question }, { role: "assistant", content: turn.answer });
  }
  messages.push({ role: "user", content: question });
  return { ...body, messages, logprobs: true, top_logprobs: 5 };
}

async function run() {
  const question = isChat() ? $("prompt").value.trim() : $("prompt").value;
  if (!question) return $("prompt").focus();
  running?.abort();
  const mine = running = new AbortController();
  if (!isChat()) $("talk").replaceChildren();
  $("empty")?.remove();
  $("message").hidden = $("rounds").hidden = true;
  busy(true);
  const turn = add($("talk"), "div", "turn");
  if (isChat()) add(turn, "p", "question", question);
  if (isChat()) $("prompt").value = "";
  const choice = $("speculative").value;
  const kinds = [["Speculative", choice === "auto" ? "auto" : Number(choice)]];
  if ($("beside").checked) kinds.push(["Plain", "off"]);
  const place = add(turn, "div", "panes");
  const panes = kinds.map(([title, kind]) => new Pane(place, title, asked(question, kind), { told: tell, chosen: choose }));
  follows = true;
  await play(turn, panes, question, mine);
}

// Plays the texts one by one, so that each has the machine alone, and keeps what came of them.
async function play(turn, panes, question, mine) {
  const [fast, plain] = panes;
  let failed = null;
  follow(turn);
  try {
    for (const pane of panes) await pane.play(mine.signal, access(), () => follow(turn));
  } catch (error) {
    failed = error;
  }
  if (running !== mine) return; // somebody began anew
  running = null;
  busy(false);
  if (failed && failed.name !== "AbortError") {
    $("message").textContent = failed.message;
    $("message").hidden = false;
  }
  if (!fast.tokens.length) {
    turn.remove();
    if (isChat()) $("prompt").value = question;
    return;
  }
  if (isChat()) turns.push({ question, answer: fast.content });
  if (!failed && plain) add(turn, "p", "verdict", verdictOn(fast, plain, about)).setAttribute("role", "status");
  $("rounds").hidden = false;
  $("depths-box").hidden = !drawDepths($("depths"), fast.rounds);
  drawRound(fast, Math.max(0, fast.rounds.findIndex((round) => round.nodes.length)));
  follow(turn);
}

// Brings a question to the top of the page as soon as there is so much below it, unless the reader
// has scrolled meanwhile.
function follow(turn) {
  if (follows) turn.scrollIntoView({ block: "start" });
}

function busy(now) {
  $("run").hidden = now;
  $("stop").hidden = !now;
}

// -- what a token says ------------------------------------------------------------------------

function tell(pane, index, span) {
  const tip = $("tip");
  tip.hidden = !pane;
  if (!pane) return;
  const token = pane.tokens[index], logprobs = pane.logprobs[index];
  tip.replaceChildren();
  add(tip, "div", "", `${token.origin}, round ${token.round + 1}`);
  if (logprobs) {
    const table = add(tip, "table");
    for (const [text, logprob] of logprobs.top) {
      const row = add(table, "tr", text === logprobs.token ? "own" : "");
      add(row, "td", "", about?.ends.includes(text) ? "end" : JSON.stringify(text));
      add(row, "td", "", `${(100 * Math.exp(logprob)).toFixed(1)} %`);
    }
  }
  const at = span.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - tip.offsetWidth - 8))}px`;
  const below = at.bottom + 8 + tip.offsetHeight < innerHeight;
  tip.style.top = `${below ? at.bottom + 8 : at.top - tip.offsetHeight - 8}px`;
}

function choose(pane, number) {
  drawRound(pane, number);
  $("tree-box").scrollIntoView({ block: "nearest" });
}

function drawRound(pane, number) {
  shown = { pane, number };
  const round = pane.rounds[number];
  $("tree-box").hidden = !round;
  if (!round) return;
  const title = `Round ${number + 1} of ${pane.rounds.length}`;
  $("tree-title").textContent = title;
  Object.assign($("round"), { max: pane.rounds.length, value: number + 1 });
  const texts = round.tokens.map(quoted).join(" ");
  $("round-words").textContent = round.nodes.length
    ? `${round.nodes.length} drafted, ${round.path.length} kept; emitted: ${texts}`
    : `nothing drafted; emitted: ${texts}`;
  $("tree").replaceChildren(treeOf(round, title));
}

// -- the page ---------------------------------------------------------------------------------

const turnTo = (step) => {
  const number = Math.max(0, Math.min(shown.pane.rounds.length - 1, shown.number + step));
  drawRound(shown.pane, number);
};
for (const kind of ["wheel", "touchmove", "keydown"]) {
  document.querySelector("main").addEventListener(kind, () => { follows = false; }, { passive: true });
}
$("form").addEventListener("submit", (event) => { event.preventDefault(); run(); });
$("stop").addEventListener("click", () => running?.abort());
$("anew").addEventListener("click", begin);
for (const mode of document.querySelectorAll("[name=mode]")) mode.addEventListener("change", begin);
$("earlier").addEventListener("click", () => turnTo(-1));
$("later").addEventListener("click", () => turnTo(1));
$("round").addEventListener("input", () => drawRound(shown.pane, Number($("round").value) - 1));
$("key").addEventListener("change", introduce);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault(); // in a field, Enter would send the form as well
  run();
});
$("beside").checked = matchMedia("(min-width: 48rem)").matches; // a phone has no room beside it
await introduce();
