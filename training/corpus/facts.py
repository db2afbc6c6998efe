"""Capitals and other facts, asked in many ways, in plain text and in dialogues.

Held out are combinations of a fact and a phrasing: the model was trained on the fact
and on the phrasing, but not on both together.
"""

from training.corpus.chat import Message, assistant, dialogue, system, user
from training.corpus.example import Example, Source, completion
from training.corpus.relations import CAPITAL, OTHERS, Pair, Relation

OPENINGS = ("", "", "", "", "Hi! ", "Hello, ", "Please help me: ", "Quick question: ", "Tell me, ")
BRIEF = (" Answer in one word.", " Just the answer, please.", " Be brief.")
BRIEF_SYSTEM = "Answer as briefly as you can."
CHECKS = ("Is {v} the capital of {s}?", "Is it true that {v} is the capital of {s}?")


def capitals(source: Source) -> Example:
    if source.chance(0.07):
        return _yes_or_no(source)
    return _fact(source, CAPITAL)


def facts(source: Source) -> Example:
    weights = [len(relation.pairs) ** 0.5 for relation in OTHERS]
    return _fact(source, source.rng.choices(OTHERS, weights)[0])


def statement(source: Source) -> str:
    """One true sentence, used as filler."""
    relation = CAPITAL if source.chance(0.3) else source.pick(OTHERS)
    subject, value = source.pick(relation.pairs)
    phrasings = [s for s in relation.statements if "\n" not in s and ":" not in s]
    return capitalised(source.pick(phrasings).format(s=subject, o=value)) + "."


def capitalised(text: str) -> str:
    return text[0].upper() + text[1:]


def _fact(source: Source, relation: Relation) -> Example:
    kind = source.rng.random()
    if kind < 0.5:
        return _completion(source, relation, relation.statements, "{o}")
    if kind < 0.6 and relation.reverse:
        return _completion(source, relation, relation.reverse, "{s}")
    return _dialogue(source, relation)


def _completion(
    source: Source, relation: Relation, phrasings: tuple[str, ...], target: str
) -> Example:
    pair, phrasing = _draw(source, relation, phrasings)
    before, value = (part.format(s=pair[0], o=pair[1]) for part in (phrasing[:-4], target))
    stop = "" if before.endswith(":") else "."
    return completion(relation.task, capitalised(before), f" {value}", stop)


def _dialogue(source: Source, relation: Relation) -> Example:
    messages: list[Message] = []
    is_brief = source.chance(0.3)
    if is_brief and source.chance(0.3):
        messages.append(system(BRIEF_SYSTEM))
    for _ in range(source.pick((1, 1, 2, 3))):
        pair, phrasing = _draw(source, relation, relation.questions)
        question = source.pick(OPENINGS) + phrasing.format(s=pair[0])
        if is_brief:
            reply = capitalised(pair[1])
            question += "" if messages and messages[0]["role"] == "system" else source.pick(BRIEF)
        else:
            reply = capitalised(relation.statements[0].format(s=pair[0], o=pair[1])) + "."
        messages += [user(capitalised(question)), assistant(reply)]
    return dialogue(relation.task, messages)


def _draw(source: Source, relation: Relation, phrasings: tuple[str, ...]) -> tuple[Pair, str]:
    return source.draw(lambda: (source.pick(relation.pairs), source.pick(phrasings)))


def _yes_or_no(source: Source) -> Example:
    subject, capital = source.pick(CAPITAL.pairs)
    claimed, question = source.draw(
        lambda: (
            capital if source.chance(0.5) else source.pick(CAPITAL.pairs)[1],
            source.pick(CHECKS),
        )
    )
    verdict = "Yes" if claimed == capital else "No"
    reply = f"{verdict}, the capital of {subject} is {capital}."
    return dialogue("capitals", [user(question.format(v=claimed, s=subject)), assistant(reply)])
