"""`LarkRules`: the rules and terminals of a grammar in Lark's notation, as they are found.

Knows no schema. Invariant: a name has one body, and equal bodies have one name.
"""

import re
from dataclasses import dataclass, field

_WORD = re.compile(r"\w+")


@dataclass(slots=True, eq=False)
class LarkRules:
    """Rules and terminals by their bodies; equal bodies are one."""

    names: dict[str, str] = field(default_factory=dict[str, str])
    bodies: dict[str, str] = field(default_factory=dict[str, str])
    parametric: set[str] = field(default_factory=set[str])

    def terminal(self, body: str) -> str:
        return self._named("T", body)

    def rule(self, body: str) -> str:
        return self._named("r", body)

    def new_rule(self) -> str:
        name = f"r{len(self.bodies)}"
        self.bodies[name] = ""
        return name

    def text_from(self, start: str) -> str:
        """The grammar, of the rules that can be reached."""
        needed, waiting = {start}, [start]
        while waiting:
            for word in _WORD.findall(self.bodies[waiting.pop()]):
                if word in self.bodies and word not in needed:
                    needed.add(word)
                    waiting.append(word)
        lines = [
            f"{name}::_: {body}" if name in self.parametric else f"{name}: {body}"
            for name, body in self.bodies.items()
            if name in needed
        ]
        return "\n".join([f"start: {start}", *lines])

    def _named(self, prefix: str, body: str) -> str:
        if body not in self.names:
            self.names[body] = f"{prefix}{len(self.bodies)}"
            self.bodies[self.names[body]] = body
        return self.names[body]
