"""`ModelTurns`: who is loaded, who makes room, and when; the time is the test's."""

from cadenza.server.model_turns import IDLE_S, TURN_S, ModelTurn, ModelTurns, Moves, WaitingCall


class Models:
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
        self.models[place].waiting.append(WaitingCall(self._num_calls, str))

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
    models = Models()
    first, second = models.models
    models.ask(1)
    moves = models.after(IDLE_S / 2)
    assert (models.states, moves.look_at_s) == (["ready", "unloaded"], 100.0 + IDLE_S)
    assert models.after(IDLE_S / 2).unload == [first]
    first.gone()
    assert models.after(0.1).load == [second]
    models.load(1)
    assert models.after(0.1) == Moves(look_at_s=None, load=[], unload=[], idle=[])


def test_a_model_in_use_has_its_turn_and_then_finishes_what_is_open() -> None:
    models = Models()
    first = models.models[0]
    first.entered()
    models.ask(1)
    assert models.after(TURN_S - 0.1).look_at_s == 100.0 + TURN_S
    assert models.states == ["ready", "unloaded"]
    assert models.after(0.1).unload == []
    assert models.states == ["draining", "unloaded"]
    first.left(models.now_s)
    assert models.after(0.0).unload == [first]


def test_a_turn_is_at_least_as_long_as_the_load_before_it() -> None:
    models = Models()
    models.models[0].entered()
    models.models[0].load_s = 40.0
    models.ask(1)
    assert models.after(39.9).look_at_s == 140.0
    assert models.states[0] == "ready"
    models.after(0.1)
    assert models.states[0] == "draining"


def test_a_model_goes_on_when_nobody_waits_for_its_place_any_more() -> None:
    models = Models()
    models.models[0].entered()
    models.ask(1)
    models.after(TURN_S)
    assert models.states[0] == "draining"
    models.models[1].waiting.clear()
    models.after(0.1)
    assert models.states[0] == "ready"


def test_the_model_whose_call_waits_longest_is_loaded_first() -> None:
    models = Models(num_models=3)
    models.ask(2)
    models.ask(1)
    models.ask(2)
    models.after(IDLE_S)
    models.models[0].gone()
    assert models.after(0.0).load == [models.models[2]]


def test_two_clients_in_turns_spend_at_most_half_of_the_time_on_loads() -> None:
    load_s, answer_s = 20.0, 0.5
    models = Models()
    first, second = models.models
    first.load_s = load_s
    loading_s, num_loads, current, other = 0.0, 0, 0, 1
    begun_s = models.now_s
    while num_loads < 10:
        models.models[current].entered()  # its client asks again as soon as it is answered
        if not models.models[other].waiting:
            models.ask(other)
        models.after(answer_s)
        models.models[current].left(models.now_s)
        if not models.turns.advance(models.now_s).unload:
            continue
        models.models[current].gone()
        assert models.turns.advance(models.now_s).load == [models.models[other]]
        models.load(other, load_s)
        models.models[other].num_calls = 0
        loading_s, num_loads = loading_s + load_s, num_loads + 1
        current, other = other, current
    assert loading_s <= 0.5 * (models.now_s - begun_s) + load_s
    assert second.load_s == load_s


def test_of_several_loaded_models_the_one_idle_longest_makes_room() -> None:
    models = Models(num_models=3, max_loaded=2)
    models.models[0].used_s = models.now_s + 5
    models.ask(2)
    assert models.after(10.0).unload == [models.models[1]]
    assert models.states == ["ready", "unloading", "unloaded"]


def test_models_load_side_by_side_where_there_are_places() -> None:
    models = Models(num_models=3, max_loaded=3)
    for model in models.models:
        model.gone()
    models.ask(1)
    models.ask(0)
    assert models.after(0.0).load == [models.models[1], models.models[0]]


def test_a_model_that_nobody_uses_is_unloaded_after_its_time() -> None:
    models = Models(num_models=1, idle_unload_s=300.0)
    (model,) = models.models
    assert models.after(299.0).look_at_s == 400.0
    model.entered()
    assert models.after(500.0).idle == []
    model.left(models.now_s)
    assert models.after(299.0).idle == []
    assert models.after(1.0).idle == [model]


def test_a_place_that_is_becoming_free_is_not_asked_for_twice() -> None:
    models = Models(num_models=3, max_loaded=2)
    models.ask(2)
    models.after(IDLE_S)
    assert models.states.count("unloading") == 1
    assert models.after(60.0).unload == []
    assert models.states.count("ready") == 1
