// One text: asked for, streamed, and shown token by token with how each of them came.
import { add } from "./pictures.js";

let panes = 0;

export class Pane {
  // asked: what is sent. told: shows a token's alternatives. chosen: shows a token's round.
  constructor(parent, title, asked, { told, chosen }) {
    Object.assign(this, { asked, told, chosen, number: panes++ });
    this.rounds = [];
    this.seconds = 0; // of all rounds
    this.tokens = []; // {text, origin, special, round}
    this.logprobs = [];
    this.content = ""; // the text as the API sends it
    this.code = new CodeFinder();
    this.box = add(parent, "article", "pane");
    const head = add(this.box, "header");
    add(head, "h2", "", title);
    this.figures = add(head, "span", "figures", "reading …");
    this.text = add(this.box, "div", asked.messages ? "text" : "text raw");
    this.text.tabIndex = 0;
    this.text.setAttribute("role", "listbox");
    this.text.setAttribute("aria-live", "off");
    this.text.setAttribute("aria-label", `${title}: tokens; arrow keys move, Enter shows the round`);
    this.why = add(this.box, "p", "why");
    this.at = -1;
    this.text.addEventListener("keydown", (event) => this.move(event));
  }

  // grown: is called whenever there is more of it.
  async play(signal, headers, grown) {
    const path = this.asked.messages ? "v1/chat/completions" : "v1/completions";
    const answer = await fetch(path, {
      method: "POST", signal, body: JSON.stringify(this.asked),
      headers: { "Content-Type": "application/json", ...headers },
    });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    for await (const event of events(answer.body)) {
      this.take(event);
      grown();
    }
  }

  take(event) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices[0];
    this.content += choice?.text ?? choice?.delta?.content ?? "";
    if (choice?.logprobs) this.logprobs.push(...logprobsOf(choice.logprobs));
    for (const round of event.outpace?.rounds ?? []) {
      this.rounds.push(round);
      this.seconds += round.seconds;
      for (const token of round.tokens) this.show(token, this.rounds.length - 1);
    }
    const metrics = event.outpace?.metrics;
    this.count(metrics ? choice.finish_reason : null);
    if (metrics) this.end(metrics);
  }

  end(metrics) {
    this.account = metrics.account;
    if (this.asked.speculative !== "off" && this.account) this.why.textContent = this.account.sentence;
    this.text.setAttribute("aria-busy", "false");
  }

  show(token, round) {
    const index = this.tokens.push({ ...token, round }) - 1;
    const code = !token.special && this.code.isCode(token.text);
    const span = add(this.text, "span", `token ${token.origin}${code ? " code" : ""}`, shown(token));
    if (token.special) span.classList.add("special");
    span.id = `token-${this.number}-${index}`;
    span.setAttribute("role", "option");
    span.addEventListener("pointerenter", () => this.told(this, index, span));
    span.addEventListener("pointerleave", () => this.told());
    span.addEventListener("click", () => this.choose(index));
  }

  get rate() {
    return this.seconds ? this.tokens.length / this.seconds : 0;
  }

  count(reason) {
    const perPass = this.rounds.length ? this.tokens.length / this.rounds.length : 0;
    const parts = [`${this.rate.toFixed(0)} tokens/s`, `${this.tokens.length} tokens`, `${perPass.toFixed(2)} a pass`];
    if (reason === "length") parts.push("cut off");
    this.figures.textContent = parts.join(" · ") + (reason ? "" : " …");
  }

  move(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") this.told();
    if (event.key === "Enter" && this.at >= 0) this.choose(this.at);
    if (!step || !this.tokens.length) return;
    event.preventDefault();
    this.at = Math.max(0, Math.min(this.tokens.length - 1, this.at + step));
    const span = this.text.children[this.at];
    mark(span);
    this.text.setAttribute("aria-activedescendant", span.id);
    this.told(this, this.at, span);
  }

  choose(index) {
    this.at = index;
    mark(this.text.children[index]);
    this.chosen(this, this.tokens[index].round);
  }
}

// Which tokens are code: those between lines of three backticks, and those between two backticks.
export class CodeFinder {
  line = "";
  fenced = false;

  isCode(text) {
    let code = this.inCode;
    for (const letter of text) {
      if (letter === "\n") {
        if (this.atFence) this.fenced = !this.fenced;
        this.line = "";
      } else {
        this.line += letter;
      }
      code ||= this.inCode;
    }
    return code;
  }

  get atFence() {
    return this.line.trimStart().startsWith("```");
  }

  get inCode() {
    return this.fenced || this.atFence || this.line.split("`").length % 2 === 0;
  }
}

// A token as the page shows it: the names of special tokens are no text.
export function shown(token) {
  return token.special ? "" : token.text;
}

function mark(span) {
  document.querySelectorAll(".chosen").forEach((other) => other.classList.remove("chosen"));
  span.classList.add("chosen");
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

function logprobsOf(found) {
  if (found.content) {
    return found.content.map((one) => ({
      token: one.token, top: one.top_logprobs.map((other) => [other.token, other.logprob]),
    }));
  }
  // An object lists names that are numbers first, however likely they are.
  const ranked = (top) => Object.entries(top).sort((a, b) => b[1] - a[1]);
  return found.tokens.map((token, at) => ({ token, top: ranked(found.top_logprobs[at]) }));
}
