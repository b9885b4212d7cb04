"""A program that runs onefold with one more envelope field, or one more state, than it has.

    python tests/unit/store/invention field sqlite:///new.db [MODULE OLD NEW]...

The sources of some modules are changed while they are imported, as a contributor would change them: first by what is
invented, then by each triple, which takes the invention out of one place.  Prints where the invention was lost.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

#: What a contributor would write: the module, a line of it, and that line with what is new.
INVENTIONS = {
    "field": (
        "onefold.message.envelope",
        "    saga: bool = False\n",
        "    saga: bool = False\n    invented: str = ''\n",
    ),
    "state": ("onefold.store.states", "    DISCARDED = 6\n", "    DISCARDED = 6\n    INVENTED = 7\n"),
}


class Changed(SourceFileLoader):
    """Loads a module from its source with some texts replaced."""

    changes: Sequence[tuple[str, str]] = ()

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode()
        for old, new in self.changes:
            assert source.count(old) == 1, (
                f"{fullname} has {source.count(old)} times {old!r}; bring this test up to date"
            )
            source = source.replace(old, new)
        return compile(source, self.path, "exec")


class Finder(MetaPathFinder):
    """Finds the modules that are changed before the usual finders do."""

    def __init__(self, changes: Sequence[tuple[str, str, str]]) -> None:
        self.changes = changes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        changes = [(old, new) for module, old, new in self.changes if module == fullname]
        spec = PathFinder.find_spec(fullname, path, target) if changes else None
        if spec is not None and spec.origin is not None:
            spec.loader = loader = Changed(fullname, spec.origin)
            loader.changes = changes
        return spec


if __name__ == "__main__":
    _, kind, url, *texts = sys.argv
    triples = list(zip(texts[::3], texts[1::3], texts[2::3], strict=True))
    sys.meta_path.insert(0, Finder([INVENTIONS[kind], *triples]))
    follow = importlib.import_module(f"follow_{kind}").follow
    for problem in asyncio.run(follow(url)):
        print(problem)
