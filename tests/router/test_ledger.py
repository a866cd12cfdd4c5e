"""The ledger reuses ids of extended contexts, and tells where one broke off."""

from hypothesis import given
from hypothesis import strategies as st

from prefillshare_server.router.ledger import KEPT_ENDS, Ledger, Lost


def anywhere(text: str, position: int) -> bool:
    return True


def ids_of(text: str) -> list[int]:
    return [ord(character) for character in text]


def keep(ledger: Ledger, text: str, role: str = "alpha") -> None:
    match = ledger.match(text, anywhere)
    rest = text[match.chars :]
    ledger.keep_context(match.end, rest, ids_of(rest), role)


def test_nothing_is_reused_at_first_and_nothing_is_broken() -> None:
    match = Ledger().match("abc", anywhere)
    assert (match.chars, match.ids, match.extends) == (0, (), True)


def test_the_longest_kept_prefix_wins() -> None:
    ledger = Ledger()
    for text in ("ab", "abcd", "abcx"):
        keep(ledger, text)
    match = ledger.match("abcdef", anywhere)
    assert match.chars == 4
    assert list(match.ids) == ids_of("abcd")


def test_generated_ids_are_kept_as_they_were_generated() -> None:
    ledger = Ledger()
    end = ledger.keep_context(None, "q|", ids_of("q|"), "alpha")
    ledger.keep_answer(end, "answer", [1, 2])
    match = ledger.match("q|answer|more", anywhere)
    assert list(match.ids) == [*ids_of("q|"), 1, 2]


def test_concurrent_branches_agree_on_the_first_ids_of_a_text() -> None:
    ledger = Ledger()
    end = ledger.keep_context(None, "q", [7], "alpha")
    ledger.keep_answer(end, "yes", [1])
    ledger.keep_answer(end, "yes", [2, 3])
    assert ledger.match("qyes", anywhere).ids == (7, 1)


def test_ids_are_only_cut_where_the_tokenizer_would_cut() -> None:
    ledger = Ledger()
    keep(ledger, "ab")
    keep(ledger, "abcd")
    match = ledger.match("abcdef", lambda text, position: position == 2)
    assert match.chars == 2
    assert match.extends


def test_a_context_that_extends_no_recent_one_is_a_break() -> None:
    ledger = Ledger()
    keep(ledger, "abcdef")
    assert not ledger.match("abXdefgh", anywhere).extends
    assert ledger.lost(ids_of("abXdefgh")) == Lost(token_index=2, lost_tokens=4)


def test_a_shortened_context_is_a_break() -> None:
    ledger = Ledger()
    keep(ledger, "abcdef")
    assert not ledger.match("abcd", anywhere).extends
    assert ledger.lost(ids_of("abcd")) == Lost(token_index=4, lost_tokens=2)


def test_branches_of_a_kept_context_are_no_breaks() -> None:
    ledger = Ledger()
    keep(ledger, "ab")
    keep(ledger, "ab1")
    assert ledger.match("ab2", anywhere).extends
    assert ledger.match("ab", anywhere).extends


def test_an_edit_behind_all_recent_contexts_is_a_break() -> None:
    """Ids in front of the edit are still reused."""
    ledger = Ledger()
    text = ""
    for number in range(2 * KEPT_ENDS):
        text += chr(ord("a") + number % 26)
        keep(ledger, text)
    match = ledger.match("abX" + text[3:], anywhere)
    assert not match.extends
    assert match.chars == 2


def test_a_role_has_seen_what_was_prefilled_for_it() -> None:
    ledger = Ledger()
    keep(ledger, "abcd", role="alpha")
    keep(ledger, "abcdef", role="beta")
    assert ledger.read("alpha", ids_of("abcdefg")).by_role == 4
    assert ledger.read("beta", ids_of("abcdefg")).by_role == 6
    assert ledger.read("gamma", ids_of("abcdefg")).by_role == 0
    assert ledger.read("beta", ids_of("abXdef")).by_role == 2


def test_what_any_role_has_read_is_shared_but_where_roles_are_kept_apart() -> None:
    ledger = Ledger()
    keep(ledger, "abcd", role="alpha")
    keep(ledger, "abcdef", role="beta")
    assert ledger.read("alpha", ids_of("abcdefg")).shared == 6
    assert ledger.read("alpha", ids_of("abcdefg"), isolated=True).shared == 4


def test_what_was_cached_before_the_session_read_it_is_nobodys_work_here() -> None:
    ledger = Ledger()
    assert first_read(ledger, "abcdef", "alpha", cached=4) == 2
    # The next role finds all of it cached, and this session computed two tokens of that.
    assert first_read(ledger, "abcdef", "beta", cached=5) == 2
    # Three more were there before, though this session is not the one that computed them.
    assert first_read(ledger, "abcdefghij", "alpha", cached=9) == 1
    # A fork has the beginning in common, and with it who computed that.
    assert first_read(ledger, "abcdXY", "gamma", cached=4) == 2


def test_what_stood_behind_a_context_and_now_begins_its_next_message_was_read_too() -> None:
    ledger = Ledger()
    first_read(ledger, "abcd", "alpha", cached=0)
    # The opening of an answer came behind it, of which the cache has the whole block "abcdef".
    assert first_read(ledger, "abcdefgh", "beta", cached=6, shared=6) == 8


def first_read(ledger: Ledger, text: str, role: str, cached: int, shared: int | None = None) -> int:
    before, match = ledger.read(role, ids_of(text)), ledger.match(text, anywhere)
    rest = text[match.chars :]
    end = ledger.keep_context(match.end, rest, ids_of(rest), role)
    assert end is not None
    return ledger.first_read(end, before, cached, before.shared if shared is None else shared)


def test_contexts_given_as_ids_count_as_seen_and_match_no_text() -> None:
    ledger = Ledger()
    ledger.keep_context(None, None, [1, 2, 3], "alpha")
    assert ledger.read("alpha", [1, 2, 3, 4]).by_role == 3
    assert ledger.match("", anywhere).end is None


def test_a_fork_knows_the_contexts_so_far_and_goes_its_own_way() -> None:
    ledger = Ledger()
    keep(ledger, "ab")
    fork = ledger.fork()
    keep(fork, "abcd")
    assert fork.match("abcde", anywhere).chars == 4
    assert ledger.match("abcde", anywhere).chars == 2


def test_memory_is_bounded_by_the_recent_contexts() -> None:
    ledger = Ledger()
    for number in range(200):
        keep(ledger, f"{number:04d}" * 10)
    assert len(list(ledger._pieces())) <= KEPT_ENDS


@given(st.lists(st.text("ab", max_size=8), min_size=1, max_size=25), st.text("ab", max_size=10))
def test_reused_ids_are_always_those_of_the_matched_text(kept: list[str], asked: str) -> None:
    ledger = Ledger()
    for text in kept:
        keep(ledger, text)
    match = ledger.match(asked, anywhere)
    assert list(match.ids) == ids_of(asked[: match.chars])
    recent = [text for text in kept[-KEPT_ENDS:] if text]
    longest = max((len(text) for text in recent if asked.startswith(text)), default=0)
    assert match.chars >= longest
    if not match.extends:
        shared = ledger.lost(ids_of(asked)).token_index
        assert shared == max(common(text, asked) for text in known(ledger))


def common(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def known(ledger: Ledger) -> list[str]:
    return ["".join(piece.text or "" for piece in end.path()) for end in ledger._pieces()]
