"""Policies that choose how much is drafted and in which shape, by costs and acceptance rates.

Numbers here were chosen on replays: recorded texts of eight tasks (code, editing, maths, ...),
decoded again by a simulated clock at the costs of several machines
(`lab/measure/replayed.py`, `lab/decisions.md`). "With 3 replays are .997 times as fast, editing
.967" says what another value would bring over all tasks, and in the worst one.
"""
