"""Prompts of a load, drawn or read from a file, and when they arrive. Lengths of drawn texts are in
words, of a file's answers in characters. Invariants: the same settings give the same requests;
prompts of a file are repeated only when all were sent."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from cadenza.bench.workloads import FIRST_TOKEN_ID, ChatMessages, PlannedRequest
from cadenza.errors import ConfigError, show

DatasetName = Literal["random", "sharegpt", "prefix-repetition", "multi-turn", "custom"]
Lengths = tuple[int, int]

CHARS_PER_TOKEN = 4  # of an answer in a file, whose length in tokens is the server's to know
DEFAULT_FILE_LENS = (1, 1024)
DEFAULT_CUSTOM_TOKENS = 256
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
_MAX_SHAREGPT_CHARS = 1024 * CHARS_PER_TOKEN
_MIN_SHAREGPT_CHARS = 4 * CHARS_PER_TOKEN

# Words that have one token each in most vocabularies.
WORDS = tuple(
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night "
    "point home water room mother area money story fact month lot right study book eye job word "
    "business issue side kind head house service friend father power hour game line end member law "
    "car city name team minute idea body back parent face level office door health person art war "
    "history party result change morning reason research girl guy moment air teacher force "
    "education foot boy age policy music process figure market sense nation plan college interest "
    "death course someone experience behind local street church class field build stay fall reach "
    "kill raise pass sell require report decide pull".split()
)


class PromptSource(Protocol):
    """The prompts of a data set."""

    def take(self, count: int, part: int) -> list[PlannedRequest]:
        """Different parts share none of those that are drawn."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnPrompts:
    """Each different, as token ids below `vocab_size` or as words. `num_turns`: of a conversation,
    a chat in words; None for single prompts. `num_prefixes`, `prefix_len`: prompts begin with one
    of so many prefixes; 0 for none."""

    seed: int
    prompt_lens: Lengths
    output_lens: Lengths
    vocab_size: int
    as_text: bool = False
    num_turns: int | None = None
    num_prefixes: int = 0
    prefix_len: int = 0

    def take(self, count: int, part: int) -> list[PlannedRequest]:
        rng = random.Random(f"bench serve {self.seed} {part}")  # noqa: S311 - a workload, no secret
        if self.num_turns is not None:
            return [self._conversation(rng, self.num_turns) for _ in range(count)]
        # The prefixes of all parts are the same, as a server's system prompts are.
        own = random.Random(f"bench serve prefixes {self.seed}")  # noqa: S311 - as above
        prefixes = [self._drawn(own, self.prefix_len) for _ in range(self.num_prefixes)]
        return [self._single(rng, prefixes) for _ in range(count)]

    def _single(self, rng: random.Random, prefixes: Sequence[Sequence[Any]]) -> PlannedRequest:
        drawn = self._drawn(rng, rng.randint(*self.prompt_lens))
        if prefixes:
            drawn = [*rng.choice(prefixes), *drawn]
        max_tokens = rng.randint(*self.output_lens)
        if self.as_text:
            return PlannedRequest(text=" ".join(drawn), max_tokens=max_tokens)
        return PlannedRequest(prompt_token_ids=tuple(drawn), max_tokens=max_tokens)

    def _drawn(self, rng: random.Random, length: int) -> list[Any]:
        known = WORDS if self.as_text else range(FIRST_TOKEN_ID, self.vocab_size)
        return rng.choices(known, k=length)

    def _conversation(self, rng: random.Random, num_turns: int) -> PlannedRequest:
        lengths = (rng.randint(*self.prompt_lens) for _ in range(num_turns))
        first, *later = (" ".join(rng.choices(WORDS, k=length)) for length in lengths)
        return PlannedRequest(
            messages=({"role": "user", "content": first},),
            turns=tuple(later),
            max_tokens=rng.randint(*self.output_lens),
        )


@dataclass(slots=True, eq=False)
class FilePrompts:
    """The prompts of a file in a random order, from the first again after the last."""

    prompts: list[PlannedRequest]
    num_taken: int = 0

    def take(self, count: int, part: int) -> list[PlannedRequest]:  # noqa: ARG002 - one order for all
        first = self.num_taken
        self.num_taken += count
        return [self.prompts[(first + at) % len(self.prompts)] for at in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFile:
    """A data set in a file; `output_lens` None leaves the answers' lengths to the file."""

    path: Path
    name: DatasetName
    output_lens: Lengths | None
    seed: int

    def read(self) -> FilePrompts:
        """Raises ConfigError."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(f"--dataset-path {self.path} cannot be read: {reason}") from None
        rng = random.Random(f"bench serve {self.seed}")  # noqa: S311 - a workload, no secret
        entries = self._lines(text) if self.name == "custom" else self._list(text)
        read = {"custom": self._custom, "sharegpt": self._sharegpt}.get(self.name, self._turns)
        found = [read(entry, where, rng) for where, entry in entries]
        prompts = [each for each in found if each is not None]
        if not prompts:
            raise ConfigError(
                f"--dataset-path {self.path} has no prompt that can be sent; of a ShareGPT file "
                f"conversations count that begin with a human's turn and have an answer, both of "
                f"{_MIN_SHAREGPT_CHARS} to {_MAX_SHAREGPT_CHARS} characters"
            )
        rng.shuffle(prompts)
        return FilePrompts(prompts)

    def _lines(self, text: str) -> list[tuple[str, Any]]:
        lines = [(f"line {at}", line) for at, line in enumerate(text.splitlines(), 1)]
        return [(where, self._parsed(line, where)) for where, line in lines if line.strip()]

    def _list(self, text: str) -> list[tuple[str, Any]]:
        found = self._parsed(text, "the file")
        if not isinstance(found, list):
            raise self._fault("the file", found, "a list of conversations")
        return [(f"entry {at}", each) for at, each in enumerate(cast(list[Any], found), 1)]

    def _parsed(self, text: str, where: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--dataset-path {self.path}: {where} is not JSON: {error}") from None

    def _custom(self, entry: Any, where: str, rng: random.Random) -> PlannedRequest:
        """ "prompt", or "messages", and perhaps "output_tokens", as vLLM has it."""
        wanted = '{"prompt": text} or {"messages": [{"role": …, "content": …}]}'
        fields = _members(entry)
        max_tokens = self._length(fields.get("output_tokens", DEFAULT_CUSTOM_TOKENS), rng)
        if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
            raise self._fault(where, max_tokens, '"output_tokens" as a whole number from 1')
        prompt = fields.get("prompt")
        if isinstance(prompt, str) and prompt:
            return PlannedRequest(text=prompt, max_tokens=max_tokens)
        messages = _messages(fields.get("messages"))
        if not messages:
            raise self._fault(where, entry, wanted)
        return PlannedRequest(messages=messages, max_tokens=max_tokens)

    def _sharegpt(self, entry: Any, where: str, rng: random.Random) -> PlannedRequest | None:
        """The first human turn as the prompt, and an answer as long as the file's own."""
        turns = self._conversation(entry, where)
        if len(turns) < 2 or turns[0]["role"] != "user":
            return None
        prompt, answer = turns[0]["content"], turns[1]["content"]
        shortest, longest = sorted((len(prompt), len(answer)))
        if shortest < _MIN_SHAREGPT_CHARS or longest > _MAX_SHAREGPT_CHARS:
            return None
        return PlannedRequest(text=prompt, max_tokens=self._length(_tokens(answer), rng))

    def _turns(self, entry: Any, where: str, rng: random.Random) -> PlannedRequest | None:
        """What the users say, in turn; the answers are the server's own."""
        turns = self._conversation(entry, where)
        said = [each["content"] for each in turns if each["role"] == "user" and each["content"]]
        answers = [each["content"] for each in turns if each["role"] == "assistant"]
        if not said:
            return None
        mean = sum(map(_tokens, answers)) // len(answers) if answers else DEFAULT_CUSTOM_TOKENS
        system = [each for each in turns[:1] if each["role"] == "system"]
        return PlannedRequest(
            messages=(*system, {"role": "user", "content": said[0]}),
            turns=tuple(said[1:]),
            max_tokens=self._length(max(1, mean), rng),
        )

    def _conversation(self, entry: Any, where: str) -> ChatMessages:
        wanted = '{"conversations": [{"from": "human", "value": …}, …]} or {"messages": […]}'
        fields = _members(entry)
        found = _messages(fields.get("messages"))
        if "conversations" in fields:
            found = _messages(fields["conversations"], "from", "value")
        if found is None:
            raise self._fault(where, entry, wanted)
        return found

    def _length(self, of_file: Any, rng: random.Random) -> Any:
        return of_file if self.output_lens is None else rng.randint(*self.output_lens)

    def _fault(self, where: str, given: object, wanted: str) -> ConfigError:
        return ConfigError(
            f"--dataset-path {self.path}: {where} is {show(given)}; --dataset {self.name} takes "
            f"{wanted}"
        )


def _messages(value: object, role: str = "role", content: str = "content") -> ChatMessages | None:
    """None for anything but a list of objects with these two members."""
    if not isinstance(value, list):
        return None
    found: list[Mapping[str, str]] = []
    for each in cast(list[object], value):
        fields = _members(each)
        who, said = fields.get(role), fields.get(content)
        if not isinstance(who, str) or not isinstance(said, str):
            return None
        found.append({"role": _ROLES.get(who, who), "content": said})
    return tuple(found)


def _members(value: object) -> dict[str, Any]:
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def _tokens(text: str) -> int:
    return max(1, len(text) // CHARS_PER_TOKEN)


RampStrategy = Literal["linear", "exponential"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Requests a second, from `rate` to `end_rate` where they differ. `burstiness`: the gamma
    distribution's shape: 1 is a Poisson process; the variance of the gaps is their mean squared
    over it."""

    rate: float
    end_rate: float | None = None
    strategy: RampStrategy = "linear"
    burstiness: float = 1.0

    @property
    def highest_rate(self) -> float:
        return max(self.rate, self.end_rate or 0.0)

    def rate_at(self, index: int, count: int) -> float:
        if self.end_rate is None:
            return self.rate
        progress = index / max(1, count - 1)
        if self.strategy == "linear":
            return self.rate + (self.end_rate - self.rate) * progress
        return self.rate * (self.end_rate / self.rate) ** progress

    def times(self, count: int, rng: random.Random) -> Iterator[float]:
        """Seconds from the start to each request; the first is due at once."""
        due_s = 0.0
        for index in range(count):
            if index:
                mean_s = 1 / self.rate_at(index, count)
                due_s += rng.gammavariate(self.burstiness, mean_s / self.burstiness)
            yield due_s
