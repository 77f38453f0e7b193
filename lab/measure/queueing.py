"""What the order of waiting texts is worth under load, in rounds: nothing here depends on the machine.

    python lab/measure/queueing.py

8 rows, 4,000 texts of four kinds (`outpace.bench.run.queueing.TOPICS`), limit 1,024 tokens. "known" is the
same order with the true lengths.
"""

import numpy as np
from usage import usage

from outpace.bench.run.queueing import played, texts
from outpace.engine.order.shortest import Shortest
from outpace.engine.order.simple import FirstCome

usage(__doc__)

ROWS, COUNT = 8, 4000


class Known:
    """An estimator that is told."""

    def __init__(self, coming):
        self.lengths = {one.request.id: float(one.length) for one in coming}

    def predict(self, request):
        return self.lengths[request.id]

    def learn(self, request):
        pass


print("load   order       mean  median   90 %   99 %   longest wait")
for load in (0.7, 0.9, 1.0):
    for name in ("fcfs", "shortest", "known"):
        coming = texts(COUNT, load, ROWS)
        order = {"fcfs": FirstCome, "shortest": Shortest, "known": lambda: Shortest(Known(coming))}[
            name
        ]()
        found = played(coming, order, ROWS)
        latency = np.array([one.latency for one in found])
        low, high, top = np.percentile(latency, [50, 90, 99])
        longest = max(one.waited for one in found)
        print(
            f"{load:4.1f}   {name:9} {latency.mean():6.0f} {low:7.0f} {high:6.0f} {top:6.0f} {longest:8}"
        )
