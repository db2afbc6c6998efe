"""`ModelTurns`: who is loaded, who makes room, and when; the time is the test's."""

from dataclasses import dataclass

from cadenza.server.model_turns import IDLE_S, TURN_S, ModelTurn, ModelTurns, Moves


@dataclass(frozen=True, slots=True)
class Call:
    number: int


class Town:
    """Models of which the first is loaded, and the moves so far."""

    def __init__(
        self, num_models: int = 2, max_loaded: int = 1, idle_unload_s: float | None = None
    ) -> None:
        self.models = [ModelTurn() for _ in range(num_models)]
        self.turns = ModelTurns(self.models, max_loaded, idle_unload_s)
        self.now_s = 100.0
        self._num_calls = 0
        for model in self.models[:max_loaded]:
            model.began(self.now_s)
            model.loaded(self.now_s)

    def ask(self, place: int) -> None:
        self._num_calls += 1
        self.models[place].waiting.append(Call(self._num_calls))

    def after(self, seconds: float) -> Moves:
        self.now_s += seconds
        return self.turns.advance(self.now_s)

    def load(self, place: int, seconds: float = 0.0) -> None:
        self.now_s += seconds
        model = self.models[place]
        model.loaded(self.now_s)
        while model.waiting:
            model.waiting.popleft()
            model.entered()

    @property
    def states(self) -> list[str]:
        return [each.state for each in self.models]


def test_a_model_that_was_not_used_for_a_moment_makes_room_at_once() -> None:
    town = Town()
    first, second = town.models
    town.ask(1)
    moves = town.after(IDLE_S / 2)
    assert (town.states, moves.look_at_s) == (["ready", "unloaded"], 100.0 + IDLE_S)
    assert town.after(IDLE_S / 2).unload == [first]
    first.gone()
    assert town.after(0.1).load == [second]
    town.load(1)
    assert town.after(0.1) == Moves(look_at_s=None, load=[], unload=[], idle=[])


def test_a_model_in_use_has_its_turn_and_then_finishes_what_is_open() -> None:
    town = Town()
    first = town.models[0]
    first.entered()
    town.ask(1)
    assert town.after(TURN_S - 0.1).look_at_s == 100.0 + TURN_S
    assert town.states == ["ready", "unloaded"]
    assert town.after(0.1).unload == []
    assert town.states == ["draining", "unloaded"]
    first.left(town.now_s)
    assert town.after(0.0).unload == [first]


def test_a_turn_is_at_least_as_long_as_the_load_before_it() -> None:
    town = Town()
    town.models[0].entered()
    town.models[0].load_s = 40.0
    town.ask(1)
    assert town.after(39.9).look_at_s == 140.0
    assert town.states[0] == "ready"
    town.after(0.1)
    assert town.states[0] == "draining"


def test_a_model_goes_on_when_nobody_waits_for_its_place_any_more() -> None:
    town = Town()
    town.models[0].entered()
    town.ask(1)
    town.after(TURN_S)
    assert town.states[0] == "draining"
    town.models[1].waiting.clear()
    town.after(0.1)
    assert town.states[0] == "ready"


def test_the_model_whose_call_waits_longest_is_loaded_first() -> None:
    town = Town(num_models=3)
    town.ask(2)
    town.ask(1)
    town.ask(2)
    town.after(IDLE_S)
    town.models[0].gone()
    assert town.after(0.0).load == [town.models[2]]


def test_two_clients_in_turns_spend_at_most_half_of_the_time_on_loads() -> None:
    load_s, answer_s = 20.0, 0.5
    town = Town()
    first, second = town.models
    first.load_s = load_s
    loading_s, num_loads, current, other = 0.0, 0, 0, 1
    begun_s = town.now_s
    while num_loads < 10:
        town.models[current].entered()  # its client asks again as soon as it is answered
        if not town.models[other].waiting:
            town.ask(other)
        town.after(answer_s)
        town.models[current].left(town.now_s)
        if not town.turns.advance(town.now_s).unload:
            continue
        town.models[current].gone()
        assert town.turns.advance(town.now_s).load == [town.models[other]]
        town.load(other, load_s)
        town.models[other].num_calls = 0
        loading_s, num_loads = loading_s + load_s, num_loads + 1
        current, other = other, current
    assert loading_s <= 0.5 * (town.now_s - begun_s) + load_s
    assert second.load_s == load_s


def test_of_several_loaded_models_the_one_idle_longest_makes_room() -> None:
    town = Town(num_models=3, max_loaded=2)
    town.models[0].used_s = town.now_s + 5
    town.ask(2)
    assert town.after(10.0).unload == [town.models[1]]
    assert town.states == ["ready", "unloading", "unloaded"]


def test_models_load_side_by_side_where_there_are_places() -> None:
    town = Town(num_models=3, max_loaded=3)
    for model in town.models:
        model.gone()
    town.ask(1)
    town.ask(0)
    assert town.after(0.0).load == [town.models[1], town.models[0]]


def test_a_model_that_nobody_uses_is_unloaded_after_its_time() -> None:
    town = Town(num_models=1, idle_unload_s=300.0)
    (model,) = town.models
    assert town.after(299.0).look_at_s == 400.0
    model.entered()
    assert town.after(500.0).idle == []
    model.left(town.now_s)
    assert town.after(299.0).idle == []
    assert town.after(1.0).idle == [model]


def test_a_place_that_is_becoming_free_is_not_asked_for_twice() -> None:
    town = Town(num_models=3, max_loaded=2)
    town.ask(2)
    town.after(IDLE_S)
    assert town.states.count("unloading") == 1
    assert town.after(60.0).unload == []
    assert town.states.count("ready") == 1
