"""The specialists' rows: the same every time, and nothing held out is trained on."""

from random import Random

import pytest

from examples.react.roles import ROLES
from examples.react.tools import FACTS
from examples.specialists.episodes import Episode
from examples.specialists.generate import Row, held_out, rows, wrong_number
from examples.specialists.places import pair, place
from examples.specialists.score import correct, text_of

TRAINED = 600


@pytest.fixture(scope="module")
def trained() -> list[Row]:
    return [row for role in ROLES for row in rows(role, "train", TRAINED)]


@pytest.fixture(scope="module")
def kept() -> list[Row]:
    return [row for role in ROLES for row in held_out(role)]


def names(rows: list[Row]) -> set[str]:
    return {place.name for row in rows for place in row.episode.order}


@pytest.mark.parametrize("role", ROLES)
def test_the_same_seed_gives_the_same_rows(role: str) -> None:
    first = [row.to_json() for row in rows(role, "train", 30, seed=3)]

    assert first == [row.to_json() for row in rows(role, "train", 30, seed=3)]
    assert first[:10] == [row.to_json() for row in rows(role, "train", 10, seed=3)]
    assert first != [row.to_json() for row in rows(role, "train", 30, seed=4)]


def test_no_held_out_place_is_trained_on(trained: list[Row], kept: list[Row]) -> None:
    assert not names(trained) & names(kept)


def test_no_place_that_exists_is_in_the_rows(trained: list[Row], kept: list[Row]) -> None:
    texts = "\n".join(row.to_json() for row in [*trained, *kept])

    assert [name for name in FACTS if name in texts] == []


def test_no_held_out_comparison_is_trained_on(trained: list[Row], kept: list[Row]) -> None:
    assert not {row.episode.expression for row in trained} & {
        row.episode.expression for row in kept
    }


def test_no_held_out_question_is_trained_on(trained: list[Row], kept: list[Row]) -> None:
    def asked(rows: list[Row]) -> set[str]:
        return {row.episode.question.partition(". ")[2] for row in rows}

    assert not asked(trained) & asked(kept)


def test_every_case_of_a_role_is_held_out(kept: list[Row]) -> None:
    wanted = {(row.role, text_of(row.answer).partition(":")[0], len(row.messages)) for row in kept}

    assert {length for role, _, length in wanted if role == "planner"} == {1, 4, 7}
    assert {length for role, _, length in wanted if role == "toolcaller"} == {2, 5, 8}
    verdicts = [row.answer["content"] for row in kept if row.role == "critic"]
    right = sum('"verdict": "right"' in verdict for verdict in verdicts)
    assert 0.35 * len(verdicts) < right < 0.65 * len(verdicts)


def test_every_wanted_answer_is_correct(trained: list[Row], kept: list[Row]) -> None:
    for row in [*trained, *kept]:
        assert correct(row.role, text_of(row.answer), row.answer), row.to_json()


def test_the_calculators_number_is_in_the_solvers_prompt(kept: list[Row]) -> None:
    for row in kept:
        if row.role == "solver":
            assert any(
                message["content"].endswith(f"= {row.episode.number}")
                for message in row.messages
                if message["role"] == "tool"
            )


def test_a_wrong_number_is_another_number() -> None:
    random = Random(0)
    for _ in range(300):
        high, low = pair(random, "train", sentences=0)
        episode = Episode("", high, low, (high, low))
        assert float(wrong_number(random, episode)) != float(episode.number)


def test_a_pair_is_clearly_apart() -> None:
    random = Random(0)
    for _ in range(300):
        high, low = pair(random, "held-out", sentences=1)
        assert high.height_m >= 1.2 * low.height_m


def test_a_description_has_the_wanted_sentences() -> None:
    random = Random(0)
    for sentences in range(5):
        assert place(random, "train", sentences=sentences).about.count(".") == sentences
