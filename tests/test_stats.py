"""The acceptance length has one definition: tau x verify steps = the tokens that verifications gave to the answer."""

from hypothesis import given
from hypothesis import strategies as st

from eagle.cli.chat_session import ChatSession, Turn
from eagle.eval.ledger.diagnosis import cycle_of
from eagle.sample.stats import AcceptanceLength, DecodeStats

accepted_lists = st.lists(st.lists(st.integers(0, 7), max_size=6), min_size=1, max_size=4)


def test_an_eos_that_is_the_first_of_six_accepted_drafts_counts_for_one_token() -> None:
    stats = DecodeStats(accepted=[6], new_tokens=2)
    assert (stats.tau, stats.tau_raw) == (1.0, 7.0)
    assert (stats.as_dict()["tau"], stats.as_dict()["tau_raw"]) == (1.0, 7.0)


@given(accepted_lists, st.data())
def test_tau_times_steps_is_what_was_committed_wherever_answers_are_cut(
    accepted: list[list[int]], data: st.DataObject
) -> None:
    """The last block of an answer is cut anywhere behind its first token; sums over answers are sums of their parts."""
    answers = []
    for steps in accepted:
        whole = sum(steps) + len(steps)
        cut = data.draw(st.integers(0, steps[-1])) if steps else 0
        answers.append((1 + whole - cut, steps))
    length = AcceptanceLength.of(answers)
    assert length.committed == sum(new_tokens - 1 for new_tokens, _ in answers)
    assert length.steps == sum(map(len, accepted))
    if not length.steps:
        assert length.as_dict() == {"tau": None, "tau_raw": None}
        return
    assert length.tau is not None
    assert length.raw is not None
    assert abs(length.tau * length.steps - length.committed) < 1e-9
    assert 1 <= length.tau <= length.raw
    rows = [DecodeStats(accepted=steps, new_tokens=new, attempts_per_depth=[1]) for new, steps in answers]
    assert cycle_of(rows, rows, batch=1, levels=1).tau == length.tau
    session = object.__new__(ChatSession)
    session.turns = [Turn(stats=row) for row in rows]
    assert (session.totals()["tau"], session.totals()["tau_raw"]) == (length.tau, length.raw)
