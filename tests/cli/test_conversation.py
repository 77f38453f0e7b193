"""A conversation without a terminal: turns, commands, files, what fits the context."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outpace import LLM, SamplingParams
from outpace.cli.chat_session import (
    ANSWER_TOKENS,
    COMMANDS,
    OPTIONS,
    READ_AT_ONCE,
    Session,
    run_command,
)
from outpace.cli.chat_terminal import chat_through_pipe, questions
from outpace.cli.conversation import Conversation, Exchange, fitted, load, save
from outpace.errors import ConfigError, ParamsError, PromptError


class Paper:
    """A screen that keeps what was written."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.costs: list[str] = []
        self.notices: list[str] = []
        self.works: list[str] = []
        self.interrupt_after: int | None = None
        """Pieces after which the user stops the answer."""

    def piece(self, text: str) -> None:
        self.pieces.append(text)
        if len(self.pieces) == self.interrupt_after:
            raise KeyboardInterrupt

    def end(self, cost: str) -> None:
        self.costs.append(cost)

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def working(self, text: str) -> None:
        if text:
            self.works.append(text)

    @property
    def answer(self) -> str:
        return "".join(self.pieces)


@pytest.fixture(scope="module")
def llm(target: Path, drafter: Path) -> LLM:
    config = {"model": str(drafter), "num_speculative_tokens": 3}
    return LLM(target, speculative_config=config, max_model_len=64)


def begun(llm: LLM, **options: Any) -> Session:
    options = {"max_tokens": 8, "ignore_eos": True, **options}
    return Session(llm, SamplingParams(**options), Paper())


@pytest.fixture
def session(llm: LLM) -> Session:
    return begun(llm)


def paper_of(session: Session) -> Paper:
    assert isinstance(session.screen, Paper)
    return session.screen


def said(session: Session) -> list[tuple[str, str]]:
    return [(part.question, part.answer) for part in session.conversation.exchanges]


def test_each_answer_follows_from_all_that_was_said_before(session: Session, llm: LLM) -> None:
    session.conversation.system = "w9"
    assert run_command(session, "w1 w2")
    assert run_command(session, " w3 ")
    messages = [{"role": "system", "content": "w9"}, {"role": "user", "content": "w1 w2"}]
    first = llm.chat(messages, session.params).text
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "w3"}]
    second = llm.chat(messages, session.params).text
    assert said(session) == [("w1 w2", first), ("w3", second)]
    assert paper_of(session).answer == first + second
    assert len(paper_of(session).costs) == 2


def test_an_option_that_is_refused_changes_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that does not go with what the model's generation_config says."""
    monkeypatch.setattr(llm.input_processor, "defaults", {"max_new_tokens": 6})
    asked = Session(llm, SamplingParams(ignore_eos=True), Paper())
    with pytest.raises(ParamsError, match="min_tokens=30 is more than the 6 tokens"):
        run_command(asked, "/set min_tokens 30")
    assert asked.params.min_tokens is None
    assert run_command(asked, "w1")
    assert said(asked)


def test_an_empty_line_asks_nothing(session: Session) -> None:
    assert run_command(session, "  ")
    assert said(session) == []


def test_two_slashes_ask_a_question_that_begins_with_one(session: Session) -> None:
    run_command(session, "//w1")
    assert said(session)[0][0] == "/w1"


def test_what_was_learned_is_written_after_each_answer(
    session: Session, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[bool] = []
    monkeypatch.setattr(
        llm.engine, "flush", lambda: flushed.append(llm.engine.has_unfinished_requests)
    )
    session.ask("w1 w2")
    session.ask("w3")
    assert flushed == [False, False]


def test_a_stopped_answer_is_kept_and_marked(session: Session) -> None:
    paper_of(session).interrupt_after = 2
    run_command(session, "w1")
    (exchange,) = session.conversation.exchanges
    assert exchange.stopped
    assert exchange.answer == paper_of(session).answer
    assert 0 < len(exchange.answer.split()) < 8
    assert "stopped" in paper_of(session).notices[-1]
    run_command(session, "w2")  # and the conversation goes on, with the part that was said
    assert [part.stopped for part in session.conversation.exchanges] == [True, False]


def test_ctrl_c_ends_the_conversation_of_a_pipe(session: Session) -> None:
    paper_of(session).interrupt_after = 2
    with pytest.raises(KeyboardInterrupt):
        chat_through_pipe(session, ["w1\n", "w2\n"])
    assert [exchange.question for exchange in session.conversation.exchanges] == ["w1"]


def test_an_answer_stopped_before_its_first_word_is_not_kept(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(session.llm.engine, "step", stopped)
    run_command(session, "w1")
    assert said(session) == []
    assert "not kept" in paper_of(session).notices[-1]
    assert session.unanswered


def test_every_turn_reads_only_what_is_new(target: Path, drafter: Path) -> None:
    config = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 3}
    llm = LLM(target, speculative_config=config, max_model_len=4096)
    session = begun(llm)
    run_command(session, "w1 " * 1500)  # more than a draft model keeps of other texts
    unread = tokens_that_are_fed(llm)
    run_command(session, "w2 w3 w4")
    # The last token of the answer, the template's word, and the question with its own.
    assert unread["target"] <= 16
    assert unread["drafter"] <= 16
    run_command(session, "/regenerate")
    assert len(said(session)) == 2
    assert unread["target"] <= 2 * 16 + 2 * 8
    assert unread["drafter"] <= 2 * 16 + 2 * 8


def tokens_that_are_fed(llm: LLM) -> dict[str, int]:
    """Returns counts of the tokens of texts that target and draft model are fed from now on, in
    passes of more than a draft."""
    counts = {"target": 0, "drafter": 0}
    owners: list[tuple[str, Any]] = [("target", llm.engine.target), ("drafter", llm.engine.drafter)]
    for name, owner in owners:
        forward = owner.runner.forward

        def counting(
            tokens: Any, *rest: Any, by: str = name, do: Any = forward, **more: Any
        ) -> Any:
            counts[by] += tokens.shape[1] if tokens.shape[1] > 5 else 0
            return do(tokens, *rest, **more)

        owner.runner.forward = counting
    return counts


def _counted(
    counts: dict[str, int], name: str, forward: Any, tokens: Any, *a: Any, **b: Any
) -> Any:
    counts[name] += tokens.shape[1] if tokens.shape[1] > 5 else 0
    return forward(tokens, *a, **b)


def test_a_long_prompt_says_how_far_it_is_read(target: Path) -> None:
    config = {"method": "none"}
    llm = LLM(target, speculative_config=config, max_num_batched_tokens=READ_AT_ONCE)
    session = begun(llm)
    run_command(session, "w1 " * 300)
    words = len(llm.chat_ids([{"role": "user", "content": "w1 " * 300}]))
    assert paper_of(session).works[:3] == [
        f"reading {words} tokens",
        f"reading: 128 of {words} tokens",
        f"reading: 256 of {words} tokens",
    ]
    assert paper_of(session).answer
    run_command(session, "w2")
    assert f"reading: 128 of {words} tokens" not in paper_of(session).works[3:]


def test_ctrl_c_acts_between_two_pieces_of_the_prompt_and_keeps_what_was_read(target: Path) -> None:
    config = {"method": "none"}
    llm = LLM(target, speculative_config=config, max_num_batched_tokens=READ_AT_ONCE)
    session = begun(llm)
    session.wants_stop = lambda: llm.engine.waiting.first is None and steps[0] == 2
    steps, step = [0], llm.engine.step

    def counted() -> Any:
        steps[0] += 1
        return step()

    llm.engine.step = counted  # type: ignore[method-assign]
    run_command(session, "w1 " * 600)
    assert steps == [2]
    assert (session.stopped, session.unanswered, said(session)) == (True, True, [])
    assert not llm.engine.has_unfinished_requests
    session.wants_stop = lambda: False
    paper_of(session).works.clear()
    run_command(session, "w1 " * 600)
    assert paper_of(session).works[1].startswith("reading: 384 of"), "256 were read before"
    assert len(said(session)) == 1
    assert not session.unanswered


def test_an_answer_that_was_cut_off_says_how_to_get_more(session: Session) -> None:
    run_command(session, "w1")
    assert "cut off at 8 tokens: /set max_tokens" in paper_of(session).notices[-1]


def test_the_oldest_exchanges_make_room_and_stay_in_the_file(
    session: Session, llm: LLM, tmp_path: Path
) -> None:
    for number in range(6):
        run_command(session, f"w{number} w1 w2 w3 w4")
    talk = session.conversation
    assert talk.forgotten > 0
    assert any("no longer shown to the model" in text for text in paper_of(session).notices)
    shown = llm.chat_ids(talk.messages("w1"))
    assert len(shown) < llm.max_model_len
    run_command(session, f"/save {tmp_path / 'all.json'}")
    assert len(load(tmp_path / "all.json").exchanges) == 6


def test_no_more_is_forgotten_than_must_be(llm: LLM) -> None:
    talk = Conversation(None, [Exchange("w1 w2 w3", "w4 w5 w6") for _ in range(20)])
    ids = fitted(llm, talk, "w7", 8)
    longer = llm.chat_ids(
        Conversation(None, talk.exchanges, talk.forgotten - 1).messages("w7"),
    )
    assert len(ids) <= 64 - 8 < len(longer)
    assert ids == llm.chat_ids(talk.messages("w7"))


def test_a_question_that_cannot_fit_is_refused(session: Session) -> None:
    with pytest.raises(PromptError, match="context holds 64, of which 8 are kept"):
        run_command(session, "w1 " * 80)
    assert said(session) == []
    run_command(session, "w1")
    with pytest.raises(PromptError, match="shorten it"):
        run_command(session, "w1 " * 80)
    assert session.conversation.forgotten == 0


def test_a_long_conversation_finds_its_room_soon(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Conversation(None, [Exchange("w1 w2 w3", "w4 w5 w6") for _ in range(1000)])
    read: list[Any] = []
    original = llm.chat_ids
    monkeypatch.setattr(llm, "chat_ids", lambda given: read.append(given) or original(given))
    assert len(fitted(llm, talk, "w7", 8)) <= 64 - 8
    assert len(read) <= 12


def test_undo_and_reset(session: Session) -> None:
    run_command(session, "w1")
    run_command(session, "w2")
    run_command(session, "/undo")
    assert [question for question, _ in said(session)] == ["w1"]
    run_command(session, "/system w5 w6")
    run_command(session, "/reset")
    assert said(session) == []
    assert session.conversation.system == "w5 w6"
    with pytest.raises(PromptError, match="nothing to take back"):
        run_command(session, "/undo")
    run_command(session, "/system none")
    assert session.conversation.system is None


def test_regenerating_draws_another_answer_to_the_same_question(llm: LLM) -> None:
    session = begun(llm, temperature=1.0)
    run_command(session, "w1 w2")
    first = said(session)
    run_command(session, "/regenerate")
    second = said(session)
    assert [question for question, _ in second] == ["w1 w2"]
    assert second != first
    assert "same answer" not in " ".join(paper_of(session).notices)
    run_command(session, "/set seed 3")
    run_command(session, "/regenerate")
    third = said(session)
    run_command(session, "/regenerate")
    assert said(session) == third
    assert "the seed is fixed" in " ".join(paper_of(session).notices)


def test_a_failed_regeneration_leaves_the_old_answer(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_command(session, "w1")
    before = said(session)

    def stopped() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(session.llm.engine, "step", stopped)
    run_command(session, "/regenerate")
    assert session.stopped
    assert said(session) == before
    assert not session.unanswered, "nothing goes back into the line"


def test_set_changes_the_next_answer_and_shows_all(session: Session) -> None:
    run_command(session, "/set temperature 0.7 top_p=0.9 max_tokens 3 stop 'w1 w2'")
    params = session.params
    assert (params.temperature, params.top_p, params.max_tokens) == (0.7, 0.9, 3)
    assert params.stop == "w1 w2"
    assert "temperature 0.7" in paper_of(session).notices[-1]
    run_command(session, "w1")
    assert session.last.num_emitted_tokens == 3
    run_command(session, "/set temperature none")
    assert session.params.temperature is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("temprature 1", "did you mean 'temperature'"),
        ("temperature", "/set temperature VALUE"),
        ("temperature warm", "temperature takes a number"),
        ("temperature -1", "temperature must be"),
        ("stop 'w1", "quotation"),
        ("logprobs 1", "does not know 'logprobs'"),
    ],
)
def test_a_wrong_option_changes_nothing(session: Session, text: str, words: str) -> None:
    before = session.params
    with pytest.raises(ParamsError, match=words):
        run_command(session, f"/set {text}")
    assert session.params == before


def test_speculation_is_switched_for_the_next_answer(session: Session) -> None:
    run_command(session, "w1 w2")
    assert session.last.num_draft_tokens > 0
    assert session.method == "draft_model, K 3"
    run_command(session, "/speculate off")
    run_command(session, "/regenerate")
    assert session.last.num_draft_tokens == 0
    assert session.method == "plain"
    run_command(session, "/speculate 2")
    run_command(session, "/regenerate")
    assert len(session.last.drafted_per_position) == 2
    assert session.method == "draft_model, K 2"
    run_command(session, "/speculate on")
    assert session.params.speculative is None


def test_speculation_needs_a_drafter(target: Path) -> None:
    session = begun(LLM(target, speculative_config={"method": "none"}))
    with pytest.raises(ConfigError, match="nothing drafts here"):
        run_command(session, "/speculate 3")
    run_command(session, "/speculate off")
    assert session.method == "plain"
    with pytest.raises(ParamsError, match="on, off, auto or a number"):
        run_command(session, "/speculate fast")


def test_statistics_and_status(session: Session) -> None:
    run_command(session, "/stats")
    assert paper_of(session).notices[-1] == "nothing was answered yet"
    run_command(session, "w1")
    run_command(session, "w2")
    run_command(session, "/stats")
    last, why, everything, why_all = paper_of(session).notices[-1].splitlines()
    assert why.startswith("drafting: draft model: ")
    assert " of 8 rounds" not in why_all, "both answers"
    assert last.startswith("last answer: 8 tokens in")
    assert everything.startswith("all 2: 16 tokens in")
    for word in (" | target", "draft_model", "greedy", "tokens/s", "acceptance", "of 64 tokens"):
        assert word in session.status


def test_a_conversation_is_saved_and_goes_on(session: Session, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    session.conversation.system = "w9"
    run_command(session, "w1")
    paper_of(session).interrupt_after = len(paper_of(session).pieces) + 1
    run_command(session, "w2")
    run_command(session, f"/save {file}")
    record = json.loads(file.read_text())
    assert [m["role"] for m in record["messages"]] == ["system", *["user", "assistant"] * 2]
    assert record["messages"][-1]["stopped"] is True
    other = begun(session.llm)
    run_command(other, f"/load {file}")
    assert other.conversation == session.conversation
    run_command(other, "w3")
    run_command(other, f"/save {file}")  # the file that it came from
    with pytest.raises(PromptError, match="exists already"):
        run_command(begun(session.llm), f"/save {file}")


def test_a_conversation_that_cannot_be_written_leaves_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(file: Path, text: str, **options: Any) -> None:
        with file.open("w", **options) as opened:
            opened.write(text[: len(text) // 2])
        raise OSError(28, "No space left on device")

    file, talk = tmp_path / "talk.json", Conversation(None, [Exchange("a question", "an answer")])
    save(talk, file, "a model")
    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(PromptError, match=r"cannot write .*: No space left on device\."):
        save(Conversation(), file, "a model")
    assert (load(file), list(tmp_path.iterdir())) == (talk, [file])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("3", "holds no conversation"),
        ('{"messages": [{"role": "user"}]}', "holds no conversation"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "in another order"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "in another order"),
    ],
)
def test_a_file_without_a_conversation_is_refused(
    session: Session, tmp_path: Path, content: str, words: str
) -> None:
    run_command(session, "w1")
    (tmp_path / "talk.json").write_text(content)
    with pytest.raises(PromptError, match=words):
        run_command(session, f"/load {tmp_path / 'talk.json'}")
    assert len(said(session)) == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/helf", "did you mean '/help'"),
        ("/undo it", "takes nothing after it"),
        ("/save", "/save FILE"),
        ("/load nothing.json", "cannot read 'nothing.json'"),
        ("/load ~nobody-known/talk.json", "in the home of a user who is not known"),
        ("/save ~nobody-known/talk.json", "in the home of a user who is not known"),
        (f"/save {'x' * 300}", "cannot write .*too long"),
        ("/save a\0b", "cannot write .*null byte"),
        ("/regenerate", "no answer to make again"),
    ],
)
def test_a_wrong_command_says_what_is_right(session: Session, line: str, words: str) -> None:
    with pytest.raises(PromptError, match=words):
        run_command(session, line)


def test_a_system_message_that_no_file_can_hold(session: Session, tmp_path: Path) -> None:
    run_command(session, "/system half \ud800")
    with pytest.raises(PromptError, match=r"cannot write .*surrogates"):
        run_command(session, f"/save {tmp_path / 'talk.json'}")


def test_help_shows_every_command(session: Session) -> None:
    run_command(session, "/help")
    assert all(f"/{name}" in paper_of(session).notices[-1] for name in (*COMMANDS, "quit"))


def test_quitting_ends(session: Session) -> None:
    assert not run_command(session, "/quit")
    assert not run_command(session, "/exit")


def test_lines_that_end_with_a_backslash_go_on() -> None:
    assert list(questions(["a\\\n", "b\r\n", "c\n", "d\\"])) == ["a\nb", "c", "d"]


def test_a_model_without_a_limit_of_its_own_gets_the_chats(llm: LLM) -> None:
    assert Session(llm, SamplingParams(), Paper()).params.max_tokens == ANSWER_TOKENS
    assert Session(llm, SamplingParams(max_tokens=5), Paper()).params.max_tokens == 5


def test_every_option_that_set_knows_exists() -> None:
    SamplingParams(**dict.fromkeys(OPTIONS[:2]))
    assert set(OPTIONS) <= set(SamplingParams.__dataclass_fields__)
