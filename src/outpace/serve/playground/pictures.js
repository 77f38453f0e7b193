// The acceptance by depth, and the tree of a round.
export function add(parent, kind, name = "", text = "") {
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

// Draws how often drafts were kept to each depth; returns whether there were any.
export function drawDepths(box, rounds) {
  const drafted = [], kept = [];
  for (const round of rounds) {
    const deepest = Math.max(0, ...depthsOf(round));
    for (let depth = 0; depth < deepest; depth++) {
      drafted[depth] = (drafted[depth] ?? 0) + 1;
      kept[depth] = (kept[depth] ?? 0) + (depth < round.path.length ? 1 : 0);
    }
  }
  box.replaceChildren();
  drafted.forEach((count, depth) => {
    const share = kept[depth] / count;
    const row = add(box, "div", "depth");
    add(row, "span", "", String(depth + 1));
    const svg = draw(row, "svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" });
    draw(svg, "rect", { class: "track", width: 100, height: 10 });
    draw(svg, "rect", { class: "bar", width: 100 * share, height: 10 });
    add(row, "span", "", `${(100 * share).toFixed(0)} % of ${count}`);
  });
  return drafted.length > 0;
}

function depthsOf(round) {
  const depths = [0];
  for (const node of round.nodes) depths.push(depths[node.parent] + 1);
  return depths;
}

// A token's text in quotes, or what a special one means.
export function quoted(token) {
  return token.special ? "end" : JSON.stringify(token.text);
}

// Returns the tree of a round's draft as an image.
export function treeOf(round, title) {
  const wide = 112, high = 34, gap = 40;
  const last = round.tokens[round.tokens.length - 1];
  const nodes = [{ text: "root", parent: -1, kind: "plain", kept: true }];
  round.nodes.forEach((node, index) => {
    const kept = round.path.includes(index + 1);
    nodes.push({ ...node, kind: kept ? "accepted" : "rejected", kept });
  });
  if (last && last.origin !== "accepted") {
    const end = round.path.length ? round.path[round.path.length - 1] : 0;
    nodes.push({ ...last, parent: end, kind: last.origin, kept: true });
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
    const text = node.parent < 0 ? "…" : quoted(node);
    const label = draw(svg, "text", { x: x(node) + 8, y: y(node) + 22 });
    label.textContent = text.length > 12 ? `${text.slice(0, 11)}…` : text;
    draw(label, "title", {}).textContent = `${text} ${node.kind}`;
  }
  return svg;
}
