"""Programs over the bundled model: pieces, forks, choices and chats, compared with the slow way of doing the same."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from penstock import LLM, SamplingParams
from penstock.config.errors import ConfigError, EngineDeadError, ParameterError, RequestError
from penstock.program import State, assistant, function, gen, select, system, user

STORY = "The guide said that the old town has three gates, and that the first of them " * 6
FIXED = {"temperature": 0, "ignore_eos": True}
ASK = "Find me a hotel in Paris for two nights."


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=1024) as made:
        yield made


def prompt_tokens(llm: LLM) -> tuple[int, int]:
    """Prompt tokens so far, and those of them found in the cache."""
    stats = llm.stats()
    return stats.prompt_tokens, stats.cached_tokens


def test_text_goes_on_where_it_ended(llm: LLM) -> None:
    state = llm.program() + STORY
    state += gen("first", max_tokens=9, **FIXED) + " And then " + gen("second", max_tokens=7, **FIXED)
    assert state.text == STORY + state["first"] + " And then " + state["second"]
    ids = state.token_ids
    plain = llm.generate([list(ids[:-7])], max_tokens=7, **FIXED)[0]
    assert plain.outputs[0].token_ids == state.output("second").token_ids
    assert "second" in state and "third" not in state


def test_stop_string_is_not_said(llm: LLM) -> None:
    whole = llm.generate(STORY, temperature=0, max_tokens=24)[0].text
    stop = whole[len(whole) // 2 :][:3]
    state = llm.program() + STORY + gen("cut", max_tokens=24, temperature=0, stop=stop)
    assert state["cut"] == whole[: whole.index(stop)] and state.text == STORY + state["cut"]


def test_forks_compute_their_common_prompt_once(llm: LLM) -> None:
    salted = "A line that no other test has. " + STORY
    before = prompt_tokens(llm)
    state = llm.program() + salted
    forks = state.fork(8)
    for number, fork in enumerate(forks):
        fork += f" Number {number}:" + gen("tip", max_tokens=6, temperature=1.0)
    state = forks.join()
    assert len(state["tip"]) == 8 and len(set(state["tip"])) > 1
    after = prompt_tokens(llm)
    common = len(state.token_ids)
    computed = (after[0] - before[0]) - (after[1] - before[1])
    suffixes = sum(len(fork.token_ids) - common for fork in forks)
    assert common <= computed <= common + suffixes
    assert all(fork.cached_share > 0.8 for fork in forks[1:])


def test_forks_go_on_from_what_their_parent_generates(llm: LLM) -> None:
    state = llm.program() + STORY + gen("start", max_tokens=5, temperature=0)
    left, right = state.fork(2)  # before the parent has generated
    left += " left"
    right += gen("more", max_tokens=4, temperature=0)
    assert left.text == state.text + " left" and left["start"] == state["start"]
    assert right.text == state.text + right["more"] and "more" not in state


def test_join_appends_texts(llm: LLM) -> None:
    state = llm.program() + "One"
    forks = state.fork(2)
    for fork, word in zip(forks, (" two", " three"), strict=True):
        fork += word
    assert forks.join(append=True).text == "One two three"
    assert len(forks[0:2]) == 2


def test_select_is_the_most_probable_choice(llm: LLM) -> None:
    choices = [" the red gate", " a", " two of the gates"]
    state = llm.program() + STORY + select("gate", choices) + "." + gen("rest", max_tokens=3)
    sums = llm.program() + STORY + select("gate", choices, normalize=False)
    for index, choice in enumerate(choices):
        told = (llm.program() + STORY + choice).token_ids
        start = len((llm.program() + STORY).token_ids)
        slow = llm.generate([list(told)], SamplingParams(max_tokens=1, prompt_logprobs=0))[0].prompt_logprobs
        total = sum(entry.logprob for entry in slow[start - 1 :])
        assert math.isclose(sums.scores("gate")[index], total, rel_tol=1e-4)
        assert math.isclose(state.scores("gate")[index], total / (len(told) - start), rel_tol=1e-4)
    assert state["gate"] == choices[max(range(3), key=state.scores("gate").__getitem__)]
    assert state.text == STORY + state["gate"] + "." + state["rest"]


def test_select_finds_the_prompt_in_the_cache(llm: LLM) -> None:
    state = (llm.program() + "Read once. " + STORY + gen("one", max_tokens=1)).wait()
    before = prompt_tokens(llm)
    state += select("next", [" and", " but"])
    asked, found = (now - then for now, then in zip((state["next"], prompt_tokens(llm))[1], before, strict=True))
    assert found > 0.8 * asked


def test_chat_renders_as_the_template_does(llm: LLM) -> None:
    state = llm.program() + system("You help travellers.") + user(ASK)
    state += assistant(gen("answer", max_tokens=20, temperature=0))
    asked = [{"role": "system", "content": "You help travellers."}, {"role": "user", "content": ASK}]
    assert llm.chat(asked, temperature=0, max_tokens=20)[0].text == state["answer"]
    state += user("Thank you.") + assistant("It was ", gen("end", max_tokens=5, temperature=0))
    asked += [{"role": "assistant", "content": state["answer"]}, {"role": "user", "content": "Thank you."}]
    slow = llm.chat(
        [*asked, {"role": "assistant", "content": "It was "}],
        temperature=0,
        max_tokens=5,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert slow[0].text == state["end"]
    assert [message["role"] for message in state.messages] == ["system", "user", "assistant", "user", "assistant"]


@function
def answer(state: State, question: str) -> None:
    state += user(question)
    state += assistant(gen("answer", max_tokens=8, temperature=1.0))
    assert state["answer"]


def test_functions_run_in_batches_that_repeat() -> None:
    questions = [{"question": f"Are there {count} trains?"} for count in range(6)]
    runs = []
    for _ in range(2):
        with LLM(max_model_len=512, seed=3) as llm:
            runs.append([state["answer"] for state in answer.run_batch(llm, questions)])
    assert runs[0] == runs[1]
    with LLM(max_model_len=512, seed=3) as llm:
        assert answer.run(llm, **questions[0])["answer"] == runs[0][0]


def test_failures_reach_whoever_reads(llm: LLM) -> None:
    state = llm.program() + "x" + gen("long", max_tokens=5000) + gen("never", max_tokens=1)
    with pytest.raises(RequestError, match="max_tokens"):
        state["never"]
    (fork,) = state.fork(1)
    with pytest.raises(RequestError, match="max_tokens"):
        fork.wait()
    with pytest.raises(ConfigError, match="put it into one of them"):
        (llm.program() + user("a") + "b").wait()
    with pytest.raises(ConfigError, match="begin with one of"):
        (llm.program() + "a" + user("b")).wait()
    with pytest.raises(ConfigError, match="first piece"):
        (llm.program() + select("a", ["b"])).wait()


def test_bad_pieces_are_refused_at_once(llm: LLM) -> None:
    with pytest.raises(ParameterError, match="choices"):
        select("a", [])
    with pytest.raises(ParameterError, match="fork the state"):
        gen("a", n=2)
    with pytest.raises(ConfigError, match="texts only"):
        user(gen("a"))
    with pytest.raises(ConfigError, match="int cannot be added"):
        llm.program().__iadd__(3)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="n is 0"):
        llm.program().fork(0)


def test_needs_an_open_engine_with_a_prefix_cache() -> None:
    with LLM(max_model_len=128, enable_prefix_caching=False) as llm, pytest.raises(ConfigError, match="prefix cache"):
        llm.program()
    with LLM(max_model_len=512) as llm:
        state = llm.program() + STORY[:200] + gen("cut off", max_tokens=300, ignore_eos=True)
    with pytest.raises(EngineDeadError):
        state.wait()
    with pytest.raises(EngineDeadError):
        state += "more"
    with pytest.raises(EngineDeadError):
        llm.program()
