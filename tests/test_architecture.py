"""The shape of the house, enforced: who may import whom, and what a cheap import may load.

Imports inside functions and under TYPE_CHECKING count like any other.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import minivllm

SOURCE = Path(minivllm.__file__).parent
ROOT = Path(__file__).parent.parent

#: Lowest first. A room imports only from lower rungs, and from itself.
RUNGS = [
    {"errors", "structured_outputs", "sampling_params", "_core"},
    {"config", "sequence", "text", "block_allocator", "models"},
    {"batch", "kv_cache"},
    {"scheduler", "sampler"},
    {"executors"},
    {"engine"},
    {"factory"},
    {"cli_options"},
    {"llm", "bench", "server"},
    {"cli"},
    {"__main__"},
]
#: Within a rung, with the reason.
NEIGHBOURS = {
    ("sampling_params", "errors"),  # values are checked where they are made
    ("structured_outputs", "errors"),
    ("sampling_params", "structured_outputs"),  # as one of their fields
    ("kv_cache", "batch"),  # a Batch is what it makes
}
#: What another engine needs, in a process of its own
PEERS = ("llama_cpp", "numpy", "openvino", "openvino_genai", "torch", "transformers", "vllm")
#: (module, imported module) inside a function: only what is heavy and optional.
LATE_IMPORTS = {
    ("minivllm.__main__", "minivllm.cli"),  # so that Ctrl-C meanwhile is caught
    ("minivllm.factory", "minivllm.executors.torch_"),
    ("minivllm.models.registry", "huggingface_hub"),
    ("minivllm.text.hf_tokenizer", "huggingface_hub"),
    ("minivllm.text.grammar", "llguidance"),  # 0.15 s, for structured outputs only
    ("minivllm.bench.memory.plot", "matplotlib.figure"),
    ("minivllm.bench.compare", "minivllm.bench.export"),  # and with it the gguf package
    ("minivllm.bench.cli", "minivllm.bench.plots"),  # and with it pandas and matplotlib
    # FastAPI and its kin take half a second, which only `serve` is to cost.
    ("minivllm.server.cli", "minivllm.server.run"),
    ("minivllm.server.cli", "minivllm.server.run_batch"),
    ("minivllm.server.cli", "minivllm.server.batch_file"),
    ("minivllm.server.cli", "minivllm.server.settings"),
    # They need aiohttp and matplotlib.
    ("minivllm.bench.serving.cli", "minivllm.bench.serving.client"),
    ("minivllm.bench.serving.cli", "minivllm.bench.serving.load"),
    ("minivllm.bench.serving.cli", "minivllm.bench.serving.plot"),
    # A script that another Python runs, which has one of them.
    *(("minivllm.bench.peer_worker", peer) for peer in PEERS),
}
SERVER_PACKAGES = (
    "fastapi", "h11", "jiter", "prometheus_client", "pydantic", "pydantic_core", "starlette",
    "typing_extensions", "uvicorn",
)  # fmt: skip
CLIS = ("minivllm.cli", "minivllm.bench.cli", "minivllm.bench.serving.cli", "minivllm.server.cli")
#: Who may import what is not ours; numpy and the standard library are everybody's.
OUTSIDERS = {
    **{peer: {"minivllm.bench.peer_worker"} for peer in PEERS},
    "torch": {
        "minivllm.executors.torch_",
        "minivllm.bench.baseline",
        "minivllm.bench.random_nanogpt",
        "minivllm.bench.peer_worker",
    },
    "pandas": {"minivllm.bench.plots"},
    "matplotlib": {"minivllm.bench.plots", "minivllm.bench.memory.plot", "minivllm.bench.serving.plot"},
    "gguf": {"minivllm.bench.export"},
    "tokenizers": {"minivllm.text"},
    "jinja2": {"minivllm.text"},
    "llguidance": {"minivllm.text.grammar"},
    "huggingface_hub": {"minivllm.models.registry", "minivllm.text.hf_tokenizer"},
    "rich": {"minivllm.llm", "minivllm.bench.memory.report", *CLIS},
    "typer": {"minivllm.cli_options", *CLIS},
    "aiohttp": {"minivllm.bench.serving.client"},
    **{name: {"minivllm.server"} for name in SERVER_PACKAGES},
    "pydantic_core": {"minivllm.server", "minivllm.bench.serving.client"},
}
#: `_core` holds the allocator, the decoder and the machine's limits; each has one face.
CORE_USERS = {"minivllm.block_allocator.native", "minivllm.executors.native", "minivllm.bench.machine"}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def imports(tree: ast.AST) -> set[str]:
    """Every module that is imported anywhere in the tree."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_module = full in MODULES or full == "minivllm._core"
                found.add(full if is_module else str(node.module))
    return found


#: The root package only names what others define, when it is asked for.
IMPORTS = {name: imports(tree) for name, tree in MODULES.items() if name != "minivllm"}


def room(module: str) -> str:
    return module.split(".")[1]


def rung(module: str) -> int:
    places = [i for i, rooms in enumerate(RUNGS) if room(module) in rooms]
    assert places, f"{module} is on no rung: give it its place in README.md and here"
    return places[0]


def ours(modules: set[str]) -> set[str]:
    return {module for module in modules if module.startswith("minivllm.")}


def test_imports_run_downward() -> None:
    wrong = [
        f"{module} imports {other}"
        for module, others in IMPORTS.items()
        for other in ours(others)
        if room(module) != room(other)
        and rung(other) >= rung(module)
        and (room(module), room(other)) not in NEIGHBOURS
    ]
    assert not wrong


def test_no_circles() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join((*path[path.index(module) :], module))
        if module in done or module not in IMPORTS:
            return
        for other in sorted(ours(IMPORTS[module])):
            visit(other, (*path, module))
        done.add(module)

    for module in IMPORTS:
        visit(module, ())
    assert done == IMPORTS.keys()


def test_engine_knows_executors_by_their_interface_only() -> None:
    for module, others in IMPORTS.items():
        if room(module) == "engine":
            assert {o for o in others if o.startswith("minivllm.executors")} <= {"minivllm.executors.base"}


def test_each_part_of_the_extension_has_one_face() -> None:
    assert {module for module, others in IMPORTS.items() if "minivllm._core" in others} == CORE_USERS


def test_outsiders_stay_in_their_rooms() -> None:
    standard = {*sys.stdlib_module_names, "numpy", "minivllm"}
    for module, others in IMPORTS.items():
        for outsider in {other.split(".")[0] for other in others} - standard:
            allowed = OUTSIDERS.get(outsider, set())
            assert any(module == home or module.startswith(f"{home}.") for home in allowed), (
                f"{module} imports {outsider}"
            )


def test_imports_inside_functions_are_of_heavy_optional_things() -> None:
    late = {
        (module, imported)
        for module, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for imported in imports(node)
    }
    assert late <= LATE_IMPORTS


def test_files_can_be_read_in_one_sitting() -> None:
    for path in SOURCE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 450, path.name


def loaded_by(statement: str) -> set[str]:
    """Modules that a fresh interpreter has after the statement."""
    code = f"import sys; before = set(sys.modules); {statement}; print(*(set(sys.modules) - before))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_importing_the_package_loads_nothing() -> None:
    loaded = {name for name in loaded_by("import minivllm") if not name.startswith("importlib")}
    assert {name for name in loaded if name.startswith("minivllm")} == {"minivllm"}
    assert not loaded & {"numpy", "torch", "tokenizers", "rich", "jinja2"}


def test_bookkeeping_is_integers() -> None:
    loaded = loaded_by("import minivllm.scheduler, minivllm.block_allocator, minivllm.sampler")
    assert {"minivllm.kv_cache.kv_cache", "numpy"} <= loaded
    rooms = {name.split(".")[1] for name in loaded if name.startswith("minivllm.")}
    assert not rooms & {"executors", "engine", "models", "text", "factory"}
    heavy = {"torch", "tokenizers", "jinja2", "rich", "typer", "safetensors", "gguf", "transformers"}
    assert not {name.split(".")[0] for name in loaded} & heavy


def test_native_engine_needs_no_torch() -> None:
    assert not loaded_by("import minivllm.llm, minivllm.factory") & {"torch", "transformers"}


def test_public_names_are_there_and_no_others() -> None:
    for name in minivllm.__all__:
        assert getattr(minivllm, name).__name__ == name
        assert name in dir(minivllm)
    assert not hasattr(minivllm, "Nothing")


def test_version_is_the_projects() -> None:
    declared = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared and declared[1] == minivllm.__version__
