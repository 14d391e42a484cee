"""Imports point down, and stand at the top of files.

`core` is what an author of transforms reads, `engine` carries out a step in the readable way, `fast` in few passes.
"""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "torchzero_clip"
CONTRIBUTING = PACKAGE.parent / "CONTRIBUTING.md"
FILES = sorted(PACKAGE.rglob("*.py"))
EVERYWHERE = {"functional", "checks", "hints", "types", "compat"}
BELOW = {
    "integrations": {"integrations", "recorder", "other_optimizer", "modular", "core", "compat"},
    "__main__": {"recorder"},
    "private": {"per_sample", "checks"},
    "late": {"per_sample", "recorder"},
    "recorder": {"recorder", "other_optimizer", "modular", "engine", "clipping", "core", "private_losses", *EVERYWHERE},
    "migrating": {"migrating", "optimizers", "other_optimizer", "modular", "checkpoints", "core", *EVERYWHERE},
    "other_optimizer": {"other_optimizer", "modular", "checkpoints", "engine", "core", "private_losses", *EVERYWHERE},
    "modular": {"modular", "checkpoints", "fast", "engine", "core", "private_losses", *EVERYWHERE},
    "checkpoints": {"checkpoints", "core", *EVERYWHERE},
    "fast": {"fast", "engine", "core", *EVERYWHERE},
    "engine": {"engine", "core", *EVERYWHERE},
    "clipping": {"clipping", "core", *EVERYWHERE},
    "optimizers": {"optimizers", "core", *EVERYWHERE},
    "core": {"core", *EVERYWHERE},
    "per_sample": {"per_sample", "private_losses", *EVERYWHERE},
    "private_losses": set(),
    "functional": EVERYWHERE,
    "hints": {"checks"},
    "checks": set(),
    "compat": set(),
    "types": set(),
}
LEVELS = [
    {"arguments", "function_names", "hooks", "modes", "norm_clippers", "processes", "whole"},
    {"layer"},
    {"gradients"},
    {"per_example", "samples"},
    {"capture"},
    {"classic", "shared_inputs"},
    {"rows_layer"},
    {"beside_rows", "each_sample"},
    {"broadcast_row"},
    {"captured_layer"},
    {"rules"},
    {"attachment"},
    {"engine"},
    {"weighting"},
    {"clipper"},
    {"opacus", "private", "verify"},
]
"""The files and folders of `per_sample`. Each imports those of earlier levels."""
IMPORTERS = {"import_module", "import__", "find_spec", "resolve_name"}


def test_contributing_says_what_each_folder_may_import():
    rows = [line.split("|")[1:4] for line in CONTRIBUTING.read_text().splitlines() if line.startswith("| `")]
    said = {
        name: set(filter(None, after.strip().split(", "))) for names, _, after in rows for name in folders_in(names)
    }
    assert said == {name: BELOW[name] - EVERYWHERE - {name} for name in said}
    assert said.keys() == {path.parent.name for path in FILES if path.parent.parent == PACKAGE}


def folders_in(names):
    return [name.strip("` /") for name in names.split(",")]


def layer(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(tree):
    """Dotted names of all imports, relative ones as '.name', also of those that are strings given to a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            yield from (f"{prefix}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2].lstrip("_") in IMPORTERS:
            assert len(node.args) == 1, ast.unparse(node)
            yield ast.literal_eval(node.args[0])  # fails for a name that is put together


@pytest.mark.parametrize(
    "path", [f for f in FILES if layer(f) != "__init__"], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_imports_point_down(path):
    tree = ast.parse(path.read_text())
    names = list(imported(tree))
    layers = {name.split(".")[1] for name in names if name.startswith("torchzero_clip.")}
    assert "torchzero_clip" not in names
    assert layers <= BELOW[layer(path)]
    assert not [name for name in names if name.startswith(".")]
    blocks = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    top = {id(node) for node in [*tree.body, *(n for block in blocks for n in block.body)]}
    nested = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom) and id(n) not in top]
    assert not nested, "imports stand at the top of a file"


@pytest.mark.parametrize(
    "path",
    [f for f in FILES if layer(f) == "per_sample" and f.parent.name + f.name != "per_sample__init__.py"],
    ids=lambda p: str(p.relative_to(PACKAGE)),
)
def test_imports_in_per_sample_point_up_its_list(path):
    own = path.relative_to(PACKAGE).parts[1].removesuffix(".py")
    names = [name.split(".") for name in imported(ast.parse(path.read_text()))]
    others = {name[2] for name in names if name[:2] == ["torchzero_clip", "per_sample"] and len(name) > 2} - {own}
    earlier = LEVELS[: next(i for i, level in enumerate(LEVELS) if own in level)]
    assert others <= set().union(*earlier)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_foreach_touches_torch_foreach(path):
    uses = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute) and "_foreach_" in n.attr]
    assert not uses or path.name == "foreach.py"


@pytest.mark.parametrize(
    "call",
    ["import_module('a.b')", "importlib.import_module('a.b')", "_importlib.import_module('a.b')", "__import__('a.b')"],
)
def test_imports_by_a_function_are_seen(call):
    assert list(imported(ast.parse(f"def late():\n    return {call}.name"))) == ["a.b"]


@pytest.mark.parametrize("call", ["import_module(f'{__name__}.b')", "__import__(name)", "import_module('.b', 'a')"])
def test_imports_of_a_name_that_is_put_together_are_refused(call):
    with pytest.raises((AssertionError, ValueError)):
        list(imported(ast.parse(call)))


def test_all_layers_are_listed():
    assert {layer(path) for path in FILES} - {"__init__"} == set(BELOW)


def module_name(path):
    return ".".join(["torchzero_clip", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")


def reached(imports, start):
    """The modules that a module imports, directly or by others."""
    found, rest = set(), [start]
    while rest:
        new = imports[rest.pop()] - found
        found |= new
        rest += new
    return found


def test_no_module_is_part_of_a_circle_of_imports():
    """Imports for types count too, except in packages. So do imports that a function makes when it is called."""
    names = {module_name(path) for path in FILES}
    imports = {}
    for path in FILES:
        tree = ast.parse(path.read_text())
        if path.name == "__init__.py":
            tree.body = [n for node in tree.body for n in (node.orelse if isinstance(node, ast.If) else [node])]
        given = set(imported(tree))
        imports[module_name(path)] = {name if name in names else name.rpartition(".")[0] for name in given} & names
    assert imports["torchzero_clip.engine.walk"] >= {"torchzero_clip.core.chain", "torchzero_clip.functional.measure"}
    assert [name for name in names if "torchzero_clip.late" in imports[name]] == ["torchzero_clip"]
    assert "torchzero_clip.integrations.huggingface" in imports["torchzero_clip.integrations"]
    assert {name for name in names if name in reached(imports, name)} == set()


def test_a_name_that_others_import_stands_once():
    """File names too, so that a reader knows which one is meant."""
    places = defaultdict(list)
    for path in FILES:
        names = [name for statement in ast.parse(path.read_text()).body for name in defined(statement)]
        # a type variable has one letter
        for name in (path.name, *(name for name in names if not name.startswith("_") and len(name) > 1)):
            places[name].append(path.relative_to(PACKAGE))
    del places["__init__.py"]
    assert {name: found for name, found in places.items() if len(set(found)) > 1} == {}


def defined(statement):
    """The names that a statement of a module defines."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    parts = [part for target in targets for part in getattr(target, "elts", [target])]
    return [part.id for part in parts if isinstance(part, ast.Name)]


def test_frames_of_callers_are_read_in_two_places():
    """To warn at the line of the user, and to refuse an optimizer that says nothing of itself."""
    words = {"_getframe", "currentframe", "walk_stack", "walk_tb", "extract_stack", "f_back", "tb_frame", "f_locals"}
    found = set()
    for path in FILES:
        tree = ast.parse(path.read_text())
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} - {"dis"}
        names |= {name.rpartition(".")[2] for name in imported(tree)}
        if names & {*words, "dis"}:
            found.add(str(path.relative_to(PACKAGE)))
    assert found == {"compat.py", "modular/validation.py"}


def test_the_optimizer_sees_one_name_of_the_fast_way():
    names = [name for path in FILES if layer(path) == "modular" for name in imported(ast.parse(path.read_text()))]
    assert {name for name in names if ".fast." in name} == {"torchzero_clip.fast.door.FastWay"}


def test_the_mark_of_the_fast_way_is_set_in_one_place():
    """All tests that need the fast way are in its folder, so that the others pass without it."""
    tests = Path(__file__).parent
    mark = "mark." + "fast_way"
    files = [path.relative_to(tests) for path in tests.rglob("*.py") if mark in path.read_text()]
    assert files == [Path("fast/conftest.py")]


def test_each_module_of_functions_has_its_tests():
    tests = Path(__file__).parent / "functional"
    modules = {path.stem for path in (PACKAGE / "functional").glob("[!_]*.py")}
    assert modules <= {path.stem.removeprefix("test_") for path in tests.glob("test_*.py")}
