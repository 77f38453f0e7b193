"""How close "auto" comes to the best fixed width, against simulated clocks.

``python lab/measure/choosing.py`` plays what tests/policy/test_controller.py does, for longer.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from usage import usage

from policy.test_controller import Simulation, alone, best_fixed, flat, request

usage(__doc__)

DRAFTS = (0.02, 0.14, 0.4)

for draft in DRAFTS:
    for chance in (0.3, 0.5, 0.75, 0.9):
        cost = flat(draft)
        rates = [
            Simulation(alone(), cost, lambda *_, p=chance: p, seed).play([request()], 1500).speed
            / best_fixed(cost, chance)
            for seed in range(4)
        ]
        print(f"a draft costs {draft}, chance {chance}: {min(rates):.2f} - {max(rates):.2f}")
for chance in (0.0, 0.05):
    longer = []
    for draft in DRAFTS:
        for seed in range(3):
            play = Simulation(alone(), flat(draft), lambda *_, p=chance: p, seed)
            for _ in range(5):
                play.play([request()], 100)
            longer.append(100 / play.speed - 100)
    print(f"chance {chance}: {min(longer):.1f} to {max(longer):.1f} % longer than plain")
