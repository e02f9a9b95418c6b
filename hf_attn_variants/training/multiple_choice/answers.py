"""How a table says which choice is right: by letter, by number or by text, and which of these it is."""

from collections.abc import Callable, Sequence
from typing import Any

from .settings import ANSWER_FORMATS, FROM_0, FROM_1, LETTER, TEXT

__all__ = ["answer_format_of", "place_of", "places_of", "shown_answer"]

# What a row's number, counted from 0, is called in an error: file, row and column.
Where = Callable[[int], str]
DESCRIPTIONS = {
    LETTER: "a letter",
    FROM_0: "a number that counts from 0",
    FROM_1: "a number that counts from 1",
    TEXT: "the text of a choice",
}


def place_of(answer: str, choices: Sequence[str], answer_format: str) -> int | None:
    """Return the place, from 0, of the choice that an answer names; None where it names none, or two that are alike.

    Args:
        answer: a letter of either case, a whole number, or a text; space around it is no part of it.
        choices: the row's.
        answer_format: one of `settings.ANSWER_FORMATS`.
    """
    if answer_format == TEXT:
        texts = [choice.strip() for choice in choices]
        return texts.index(answer) if texts.count(answer) == 1 else None
    if answer_format == LETTER:
        place = ord(answer.upper()) - ord("A") if len(answer) == 1 and answer.isascii() and answer.isalpha() else -1
    else:
        place = int(answer) - (answer_format == FROM_1) if answer.isascii() and answer.isdecimal() else -1
    return place if 0 <= place < len(choices) else None


def shown_answer(place: int, choices: Sequence[str], answer_format: str) -> Any:
    """Return what a table of this format has for the choice at a place; see `place_of`."""
    if answer_format == TEXT:
        return choices[place]
    return chr(ord("A") + place) if answer_format == LETTER else place + (answer_format == FROM_1)


def answer_format_of(answers: Sequence[str | None], choices: Sequence[Sequence[str]], where: Where) -> str:
    """Say by which format all answers name a choice of their row.

    Raises:
        ValueError: if there is none, or there are several, by which rows have other choices; the message names rows.
    """
    given = [(i, answer, row) for i, (answer, row) in enumerate(zip(answers, choices, strict=True)) if answer]
    found = {name: [place_of(answer, row, name) for _, answer, row in given] for name in ANSWER_FORMATS}
    fitting = {name: places for name, places in found.items() if None not in places}
    if not fitting:
        raise ValueError(_misfit(found, given, where))
    first, *others = fitting
    for other in others:
        apart = next(
            (i for i, pair in enumerate(zip(fitting[first], fitting[other], strict=True)) if len({*pair}) > 1), None
        )
        if apart is not None:
            number, answer, row = given[apart]
            meant = f"choice {fitting[first][apart]!r} or {fitting[other][apart]!r}, counted from 0"
            raise ValueError(
                f"{where(number)}: the answer {answer!r:.60} of {len(row)} choices may be {DESCRIPTIONS[first]} or "
                f"{DESCRIPTIONS[other]} ({meant}), and so may all {len(given)} answers: say which with "
                f"--answer_format ({first} or {other})"
            )
    return first


def _misfit(found: dict[str, list[int | None]], given: Sequence[tuple[int, str, Sequence[str]]], where: Where) -> str:
    """Return what is said where no format fits all answers: the first answer that does not fit the likeliest."""
    for at, (number, answer, row) in enumerate(given):
        if all(places[at] is None for places in found.values()):
            return _no_choice(where(number), answer, row)
    likeliest = max(found, key=lambda name: sum(place is not None for place in found[name]))
    at = found[likeliest].index(None)
    number, answer, _ = given[at]
    fits = next(name for name in found if found[name][at] is not None)
    count = sum(place is not None for place in found[likeliest])
    return (
        f"{where(number)}: the answer {answer!r:.60} is {DESCRIPTIONS[fits]}, and {count} of {len(given)} answers are "
        f"{DESCRIPTIONS[likeliest]}: mend one, or say what all are with --answer_format"
    )


def _no_choice(where: str, answer: str, choices: Sequence[str]) -> str:
    texts = [choice.strip() for choice in choices]
    if texts.count(answer) > 1:
        return f"{where}: the answer {answer!r:.60} is the text of {texts.count(answer)} choices of its row"
    last = len(choices) - 1
    letters = f"a letter from A to {chr(ord('A') + min(last, 25))}"
    return (
        f"{where}: the answer {answer!r:.60} names none of its row's {len(choices)} choices: it is neither {letters}, "
        f"a number from 0 to {last} or from 1 to {last + 1}, nor the text of a choice"
    )


def places_of(
    answers: Sequence[str | None], choices: Sequence[Sequence[str]], answer_format: str, where: Where
) -> list[int]:
    """Return the place, from 0, of each row's right choice.

    Raises:
        ValueError: if a row has no answer, or one that names no choice of its row by this format.
    """
    places = []
    for number, (answer, row) in enumerate(zip(answers, choices, strict=True)):
        if not answer:
            raise ValueError(f"{where(number)}: there is no answer")
        place = place_of(answer, row, answer_format)
        if place is None:
            shown = DESCRIPTIONS[answer_format]
            raise ValueError(
                f"{where(number)}: the answer {answer!r:.60} is to be {shown} (--answer_format {answer_format}), and "
                f"names none of its row's {len(row)} choices"
            )
        places.append(place)
    return places
