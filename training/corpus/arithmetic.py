"""Sums, differences and products, as plain lines, as questions and as word problems.

Held out are pairs of operands; for products, which can only be memorised, combinations
of a pair with a phrasing.
"""

from dataclasses import dataclass

from training.corpus.chat import assistant, dialogue, user
from training.corpus.example import Example, Source, questions
from training.corpus.words import NAMES, THINGS

TASK = "arithmetic"

QUESTIONS = {
    "+": ("What is {a} plus {b}?", "Add {a} and {b}.", "What is the sum of {a} and {b}?"),
    "-": ("What is {a} minus {b}?", "Take {b} away from {a}.", "Subtract {b} from {a}."),
    "*": ("What is {a} times {b}?", "Multiply {a} by {b}.", "What is the product of {a} and {b}?"),
}
SYMBOL_QUESTIONS = ("What is {p}?", "{p} = ?", "Calculate {p}.", "How much is {p}?", "{p}")


@dataclass(frozen=True, slots=True)
class Problem:
    a: int
    operator: str
    b: int
    phrasing: int = 0

    @property
    def result(self) -> int:
        if self.operator == "*":
            return self.a * self.b
        return self.a + self.b if self.operator == "+" else self.a - self.b

    @property
    def left_side(self) -> str:
        return f"{self.a} {self.operator} {self.b}"


def arithmetic(source: Source) -> Example:
    kind = source.rng.random()
    if kind < 0.6:
        return _lines(source)
    return _question(source) if kind < 0.85 else _word_problem(source)


def _problem(source: Source) -> Problem:
    return source.draw(lambda: _any_problem(source))


def _any_problem(source: Source) -> Problem:
    operator = source.pick("++++----*")
    if operator == "*":
        a, b = source.rng.randint(0, 12), source.rng.randint(0, 12)
        return Problem(a, operator, b, source.rng.randrange(8))
    limit = source.pick((10, 100, 100, 1000, 1000))
    a = source.rng.randrange(limit)
    b = source.rng.randrange(source.pick((limit, limit, 100)))
    return _non_negative(a, operator, b)


def _non_negative(a: int, operator: str, b: int) -> Problem:
    if operator == "-" and b > a:
        a, b = b, a
    return Problem(a, operator, b)


def _lines(source: Source) -> Example:
    problems = [_problem(source) for _ in range(source.rng.randint(1, 12))]
    pairs = [(f"{problem.left_side} =", f" {problem.result}\n") for problem in problems]
    return questions(TASK, "", pairs)


def _question(source: Source) -> Example:
    messages = []
    for _ in range(source.rng.randint(1, 3)):
        problem = _problem(source)
        if source.chance(0.5):
            text = source.pick(SYMBOL_QUESTIONS).format(p=problem.left_side)
        else:
            text = source.pick(QUESTIONS[problem.operator]).format(a=problem.a, b=problem.b)
        messages += [user(text), assistant(f"{problem.left_side} = {problem.result}")]
    return dialogue(TASK, messages)


def _word_problem(source: Source) -> Example:
    rng = source.rng
    problem = source.draw(
        lambda: _non_negative(rng.randint(2, 60), source.pick("+-"), rng.randint(1, 40))
    )
    first, second = source.rng.sample(NAMES, 2)
    things = source.pick(THINGS) + "s"
    change = source.pick(
        ("{second} gives {first} {b} more.", "Then {first} finds {b} more.")
        if problem.operator == "+"
        else ("{first} gives {b} to {second}.", "Then {first} loses {b} of them.")
    ).format(first=first, second=second, b=problem.b)
    text = f"{first} has {problem.a} {things}. {change} How many {things} does {first} have now?"
    reply = f"{problem.left_side} = {problem.result}, so {first} has {problem.result} {things}."
    return dialogue(TASK, [user(text), assistant(reply)])
