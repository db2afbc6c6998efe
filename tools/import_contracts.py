"""A contract type for import-linter: an allowlist of the direct imports of some packages.

Owns the check of direct imports against lists. Invariant: a contract may name packages that do not
exist yet, and applies to them as soon as they do.
"""

import sys
from dataclasses import dataclass

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Allowed and denied imports of `modules` without `exempt`; `None` allows all. Entries cover
    subpackages.
    """

    root: str
    modules: frozenset[str]
    exempt: frozenset[str] = frozenset()
    internal: frozenset[str] | None = None
    external: frozenset[str] | None = None
    denied: frozenset[str] = frozenset()

    def governs(self, module: str) -> bool:
        is_exempt = _is_covered(module, self.exempt, root=self.root)
        return not is_exempt and _is_covered(module, self.modules, root=self.root)

    def allows(self, target: str) -> bool:
        """Whether a governed module may import `target`. The standard library is external."""
        if _is_covered(target, self.denied, root=self.root):
            return False
        if target == self.root or target.startswith(f"{self.root}."):
            own = self.governs(target)
            return own or self.internal is None or self._has(target, self.internal)
        if target.partition(".")[0] in sys.stdlib_module_names:
            return True
        return self.external is None or self._has(target, self.external)

    def _has(self, target: str, names: frozenset[str]) -> bool:
        return _is_covered(target, names, root=self.root)


def violations(graph: ImportGraph, rules: Rules) -> list[tuple[str, str]]:
    """Direct imports (importer, imported) that the rules do not allow, in order."""
    return sorted(
        (module, target)
        for module in graph.modules
        if rules.governs(module)
        for target in graph.find_modules_directly_imported_by(module)
        if not rules.allows(target)
    )


class AllowlistContract(Contract):
    """`modules` may directly import only what `internal` and `external` list, and nothing `denied`.

    The standard library is always allowed unless denied by name. A list that is left out allows
    everything. The root package's name stands for that module alone, not for its subpackages.
    Modules in `exempt` have a contract of their own.
    """

    type_name = "allowlist"

    modules = fields.SetField(subfield=fields.StringField())
    exempt = fields.SetField(subfield=fields.StringField(), required=False)
    internal = fields.SetField(subfield=fields.StringField(), required=False)
    external = fields.SetField(subfield=fields.StringField(), required=False)
    denied = fields.SetField(subfield=fields.StringField(), required=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        output.verbose_print(verbose, f"Checking the direct imports of {self.modules}...")
        options = self.contract_options
        rules = Rules(
            root=self.session_options["root_packages"][0],
            modules=frozenset(self.modules),  # type: ignore[arg-type]
            exempt=frozenset(self.exempt or ()),  # type: ignore[arg-type]
            internal=_optional(self.internal if "internal" in options else None),
            external=_optional(self.external if "external" in options else None),
            denied=frozenset(self.denied or ()),  # type: ignore[arg-type]
        )
        found = violations(graph, rules)
        lines = [_describe(graph, importer, imported) for importer, imported in found]
        return ContractCheck(kept=not found, metadata={"lines": lines})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for line in check.metadata["lines"]:
            output.print_error(line, bold=False)
        output.new_line()


def _optional(names: object) -> frozenset[str] | None:
    return None if names is None else frozenset(names)  # type: ignore[arg-type]


def _is_covered(name: str, entries: frozenset[str], *, root: str) -> bool:
    return any(
        name == entry or (entry != root and name.startswith(f"{entry}.")) for entry in entries
    )


def _describe(graph: ImportGraph, importer: str, imported: str) -> str:
    details = graph.get_import_details(importer=importer, imported=imported)
    where = ", ".join(f"l.{detail['line_number']}" for detail in details)
    return f"{importer} must not import {imported} ({where})"
