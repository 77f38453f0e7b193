"""What is kept of a request, how long, and which row of a cache is whose."""

from __future__ import annotations

import gc

from outpace.core.logits_pipeline import RowOptions
from outpace.core.params import SamplingParams
from outpace.core.request import PerRequest, Request, RowNumbers


def request(reproducible: bool = False) -> Request:
    options = RowOptions(SamplingParams())
    return Request([1, 2], options, seed=0, max_tokens=8, reproducible=reproducible)


def test_an_interruption_leaves_what_lasts() -> None:
    one = request()
    lasting = PerRequest[list[int]](lambda _: [], lasting=True)
    passing = PerRequest[list[int]](lambda _: [])
    lasting[one].append(1)
    passing[one].append(1)
    one.state["a drafter"] = 1
    one.recover()
    assert one in lasting
    assert one not in passing
    assert lasting[one] == [1]
    assert passing[one] == []
    assert one.state["a drafter"] == 1, "its owner begins the request anew"


def test_reproducible_requests_have_no_share_in_what_others_have_in_common() -> None:
    kept = PerRequest[int](lambda _: 0, common=5)
    first, second, alone = request(), request(), request(reproducible=True)
    kept[first] = 6
    assert kept[second] == 6
    assert kept[alone] == 0
    kept[alone] = 1
    assert kept[second] == 6
    assert kept[alone] == 1
    assert first.state == {}


def test_values_are_those_of_requests_that_are_still_there() -> None:
    kept = PerRequest[int](lambda _: 0)
    first, second, third = request(), request(), request()
    kept[first], kept[second], kept[third] = 1, 2, 3
    kept.forget([second])
    del third
    gc.collect()
    assert kept.values() == [1]


def test_rows_close_ranks_as_those_of_the_engine_do() -> None:
    rows, requests = RowNumbers(), [request() for _ in range(4)]
    assert [rows.begin(one) for one in requests] == [0, 1, 2, 3]
    assert rows.end([requests[0], requests[2]]) == [1, 3]
    assert rows.of([requests[3], requests[1]]) == [1, 0]
    assert rows.begin(requests[0]) == 2
    assert rows.end(None) == []
    assert len(rows) == 0
