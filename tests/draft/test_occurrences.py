"""Look-ups in growing texts, against plain searches through all of them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.methods.lookup.continuations import likeliest_chain, likeliest_tree
from outpace.methods.lookup.occurrences import MARGIN, SEPARATOR, Occurrences
from outpace.methods.lookup.past import PastTexts

REACH = 4
TOKENS = st.integers(0, 2)
TEXTS = st.lists(TOKENS, max_size=25)


def agreeing(text: list[int], end: int, context: list[int]) -> int:
    """How many tokens before ``end`` are the context's last ones."""
    same = 0
    while same < min(REACH, len(context), end) and text[end - 1 - same] == context[-1 - same]:
        same += 1
    return same


def searched(text: list[int], context: list[int]) -> list[tuple[int, int]]:
    """Returns what `Occurrences.matches` should, for a text whose tokens are numbered from 0."""
    found = [(end, agreeing(text, end, context)) for end in range(1, len(text))]
    return [(end, same) for end, same in reversed(found) if same]


@given(st.lists(TEXTS, max_size=6), st.lists(st.integers(0, 20), max_size=6), st.data())
def test_matches_are_those_of_a_plain_search(
    parts: list[list[int]], dropped: list[int], data: st.DataObject
) -> None:
    index, text, first = Occurrences(REACH), [], 0
    for number, part in enumerate(parts):
        index.extend([*part, SEPARATOR])
        text += [*part, SEPARATOR]
        count = min(dropped[number], len(text)) if number < len(dropped) else 0
        index.forget(count)
        text, first = text[count:], first + count
    context = data.draw(st.lists(TOKENS, min_size=1, max_size=7))
    places, agree = index.matches(context)
    offset = index.end - len(text)
    assert list(zip((places - offset).tolist(), agree.tolist(), strict=True)) == searched(
        text, context
    )
    assert len(index) == len(text)
    length = data.draw(st.integers(1, 8))
    for place, found in zip(places.tolist(), index.continuations(places, length), strict=True):
        behind = text[place - offset : place - offset + length]
        assert found == [*behind, *[SEPARATOR] * (length - len(behind))]


def test_a_text_far_longer_than_the_first_buffer_is_searched_whole() -> None:
    text = [number * number % 101 for number in range(1500)]
    index = Occurrences(REACH)
    for token in text:
        index.extend([token])
    places, agree = index.matches(text[-REACH:])
    assert list(zip((places - REACH).tolist(), agree.tolist(), strict=True)) == searched(
        text, text[-REACH:]
    )
    assert all(len(each) == MARGIN for each in index.continuations(places[:2], 10 * MARGIN))


def test_what_is_forgotten_takes_no_memory() -> None:
    index = Occurrences(REACH)
    for number in range(60):
        index.extend(range(number * 100, number * 100 + 100))
        index.forget(len(index) - 100)
    small = Occurrences(REACH)
    small.extend(range(100))
    # The table of a dict never shrinks, and a buffer is twice as long as it must be.
    assert index.nbytes < 4 * small.nbytes
    assert len(index.matches([3])[0]) == 0
    assert len(index.matches([5950])[0]) == 1


# -- what follows, by frequency --------------------------------------------------------------------

CONTINUATIONS = st.lists(
    st.lists(TOKENS, min_size=0, max_size=5).map(
        lambda text: [*text, *[SEPARATOR] * (5 - len(text))]
    ),
    min_size=1,
    max_size=12,
)


def chances(texts: list[list[int]]) -> dict[tuple[int, ...], float]:
    """Returns the chance of every path, by counting."""
    counts = Counter(
        tuple(text[:end]) for text in texts for end in range(1, 6) if SEPARATOR not in text[:end]
    )
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for path in sorted(counts, key=len):
        siblings = sum(
            n for other, n in counts.items() if other[:-1] == path[:-1] and len(other) == len(path)
        )
        found[path] = found[path[:-1]] * counts[path] / siblings
    del found[()]
    return found


def paths(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*found[parent], token))
    return found[1:]


@given(CONTINUATIONS, st.integers(1, 9), st.sampled_from([0.0, 0.2, 0.6]))
def test_a_tree_has_the_most_probable_paths(
    texts: list[list[int]], nodes: int, least: float
) -> None:
    known = chances(texts)
    guess = likeliest_tree(texts, nodes, least)
    drafted = paths(guess.tokens, guess.parents)
    best = sorted((chance for chance in known.values() if chance >= least), reverse=True)[:nodes]
    assert len(set(drafted)) == len(drafted)
    assert sorted((known[path] for path in drafted), reverse=True) == best
    assert abs(guess.expected_tokens - sum(best)) < 1e-12
    assert all(parent <= place for place, parent in enumerate(guess.parents))


@given(CONTINUATIONS, st.integers(1, 9), st.sampled_from([0.0, 0.2, 0.6]))
def test_a_chain_follows_the_most_frequent_token(
    texts: list[list[int]], nodes: int, least: float
) -> None:
    known = chances(texts)
    guess = likeliest_chain(texts, nodes, least)
    assert guess.is_chain
    path: tuple[int, ...] = ()
    for token in guess.tokens:
        rivals = {
            key: chance
            for key, chance in known.items()
            if key[:-1] == path and len(key) == len(path) + 1
        }
        path = (*path, token)
        assert rivals[path] == max(rivals.values()) >= least
    along = [known[path[:end]] for end in range(1, len(path) + 1)]
    assert abs(guess.expected_tokens - sum(along)) < 1e-12
    if len(path) < min(nodes, 5):
        onward = [
            chance
            for key, chance in known.items()
            if key[:-1] == path and len(key) == len(path) + 1
        ]
        assert not onward or max(onward) < least


def test_of_equally_frequent_tokens_the_latest_is_taken() -> None:
    assert likeliest_chain([[7, 1], [8, 1]], 1).tokens == [7]
    assert likeliest_tree([[7, 1], [8, 1]], 2).tokens == [7, 8]


# -- texts of the past -----------------------------------------------------------------------------


@given(st.lists(st.lists(TOKENS, max_size=12), max_size=20), st.integers(0, 4), st.integers(0, 30))
def test_a_store_stays_within_its_bounds(
    texts: list[list[int]], max_texts: int, max_tokens: int
) -> None:
    past = PastTexts(REACH, max_texts, max_tokens)
    for text in texts:
        past.add(text)
        assert len(past) <= max_texts
        assert past.tokens <= max_tokens
        cut = text[max(0, len(text) + 1 - max_tokens) :] if max_tokens else []
        if max_texts and cut:
            end = past.occurrences.end
            assert past.occurrences.tokens(end - len(cut) - 1, end) == [*cut, SEPARATOR]


def test_what_was_of_use_is_kept_longer() -> None:
    past = PastTexts(REACH, 3, 100)
    for text in ([1, 2, 3], [4, 5, 6], [7, 8, 9]):
        past.add(text)
    past.touch(int(past.occurrences.matches([1, 2])[0][0]))
    past.add([10, 11, 12])
    known = [start for start in (1, 4, 7, 10) if len(past.occurrences.matches([start])[0])]
    assert known == [1, 7, 10]
    past.add([13, 14, 15])
    known = [start for start in (1, 7, 10, 13) if len(past.occurrences.matches([start])[0])]
    assert known == [1, 10, 13]
    past.add([16, 17, 18])  # by now that use was long ago
    known = [start for start in (1, 10, 13, 16) if len(past.occurrences.matches([start])[0])]
    assert known == [10, 13, 16]


def test_a_store_that_was_interrupted_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(tokens: object) -> None:
        raise KeyboardInterrupt

    past = PastTexts(REACH, 3, 100)
    past.add([1, 2, 3])
    past.recover()
    assert len(past) == 1
    with monkeypatch.context() as patch:
        patch.setattr(past.occurrences, "extend", stop)
        with pytest.raises(KeyboardInterrupt):
            past.add([4, 5])
    past.recover()
    assert (len(past), past.tokens) == (0, 0)
    past.add([6, 7])
    assert len(past.occurrences.matches([6])[0]) == 1
