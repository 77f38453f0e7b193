"""What the best tree promises over the one that is grown node by node, at several prices.

    python lab/measure/tree_shapes.py

Nothing is timed: tokens for each pass of the target are computed from chances of acceptance by rank
among siblings, and from what a level (a pass of the drafter) and a node (a token more to score)
cost, in passes of the target.
"""

from __future__ import annotations

from usage import usage

from outpace.core.trees.best_shape import BestShapes, best_shape
from outpace.core.trees.tree_shape import TreeShape

usage(__doc__)

NODES, LEVELS = 24, 8
CHANCES = {
    "0.9, 0.4": [0.9, 0.4, 0.2, 0.1],
    "0.7, 0.35": [0.7, 0.35, 0.175, 0.0875],
    "0.5, 0.4": [0.5, 0.4, 0.3, 0.2],
    "0.3, 0.3": [0.3, 0.3, 0.3, 0.3],
}
LEVEL_PRICES = (0.0, 0.05, 0.2, 0.4)
NODE_PRICES = (0.005, 0.02, 0.07)


def main() -> None:
    print("| chances | level | node | chain | grown | best | best / grown | worst cut |")
    print("|---|---|---|---|---|---|---|---|")
    for name, ranks in CHANCES.items():
        for level in LEVEL_PRICES:
            for node in NODE_PRICES:
                print(_line(name, [ranks] * LEVELS, level, node))


def _line(name: str, chances: list[list[float]], level: float, node: float) -> str:
    def price(nodes: int, levels: int) -> float:
        return 1 + level * levels + node * nodes

    def rate(shape: TreeShape) -> float:
        return (1 + sum(shape.reached(chances))) / price(shape.size, shape.height)

    def best_part(shape: TreeShape) -> float:
        return max(rate(shape.first(nodes)) for nodes in range(shape.size + 1))

    grown = TreeShape.grown(NODES, chances, level, node)
    chain = best_part(TreeShape.chain(LEVELS))
    found, best = best_part(grown), rate(best_shape(NODES, chances, price))
    tables = [BestShapes(NODES, levels, chances) for levels in range(1, LEVELS + 1)]
    worst = min(
        rate(grown.first(nodes))
        / max((1 + each.expected(nodes)) / price(nodes, each.levels) for each in tables)
        for nodes in range(1, NODES + 1)
    )
    figures = f"{chain:.3f} | {found:.3f} | {best:.3f} | {best / found:.3f} | {worst:.3f}"
    return f"| {name} | {level} | {node} | {figures} |"


if __name__ == "__main__":
    main()
