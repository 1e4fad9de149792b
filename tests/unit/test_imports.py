"""Imports run one way, and heavy packages wait until they are needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "xdlm"

#: What each part may import from the rest of the package.
BASE = {"errors", "structs"}
MATH = BASE | {"noise", "ops", "objective"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "structs": {"errors"},
    "files": {"errors"},
    "hub": {"errors"},
    "bundled": set(),
    "noise": BASE,
    "ops": BASE,
    "objective": BASE | {"noise", "ops"},
    "models": BASE | {"ops"},
    "tokens": {"errors", "hub"},
    "data": {"errors", "tokens", "files", "hub"},
    "sampling": MATH | {"models"},
    "config": MATH | {"models"},
    "training": MATH | {"models", "tokens", "data", "config", "files", "bundled", "__init__"},
    "evaluation": MATH
    | {"models", "tokens", "data", "sampling", "training", "config", "files", "__init__"},
}
ALLOWED["blanks"] = {"errors", "sampling", "tokens"}
ALLOWED["auto"] = {"errors", "models", "config", "training"}
ALLOWED["api"] = ALLOWED["images"] = set(ALLOWED) - {"__init__"}
ALLOWED["report"] = set(ALLOWED)
ALLOWED["__init__"] = {"errors", "structs", "api"}
ALLOWED["serve"] = {*ALLOWED, "__init__"}
ALLOWED["cli"] = {*ALLOWED, "__init__"}
ALLOWED["__main__"] = {"cli"}

#: The mathematics knows nothing of these.
FORBIDDEN_IN_MATH = {"transformers", "tokenizers", "yaml", "tyro", "rich", "torch.distributed"}
#: Optional packages: imported inside functions only.
LAZY = {"transformers", "triton", "lm_eval", "torch_fidelity", "wandb", "fastapi", "uvicorn", "pydantic",
        "matplotlib", "tokenizers", "tyro", "tensorboard", "datasets", "pyarrow", "peft", "PIL",
        "huggingface_hub", "mauve", "sklearn", "gguf"}  # fmt: skip


def part_of(file: Path) -> str:
    relative = file.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        if node.module == "xdlm":
            return [f"xdlm.{alias.name}" for alias in node.names]
        return [node.module or ""]
    return []


def test_imports_run_one_way() -> None:
    for file in PACKAGE.rglob("*.py"):
        part = part_of(file)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for name in imported(node):
                if not name.startswith("xdlm."):
                    continue
                target = name.split(".")[1]
                target = target if target in ALLOWED else "__init__"
                assert target == part or target in ALLOWED[part], f"{file}: {name}"


def test_mathematics_knows_nothing_of_the_rest() -> None:
    for part in ("noise", "ops", "objective", "structs.py"):
        files = [PACKAGE / part] if part.endswith(".py") else (PACKAGE / part).rglob("*.py")
        for file in files:
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                for name in imported(node):
                    assert not any(
                        name == bad or name.startswith(f"{bad}.") for bad in FORBIDDEN_IN_MATH
                    ), f"{file}: {name}"


def test_optional_packages_are_imported_late() -> None:
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        # Modules of kernels import Triton at their top, and are themselves imported late.
        # Those of the web do the same with what they are made of.
        lazy = LAZY - {"triton"} if file.name.startswith("fused") else LAZY
        lazy = lazy - {"fastapi", "uvicorn", "pydantic"} if file.parent.name == "web" else lazy
        for node in tree.body:
            for name in imported(node):
                assert not name.startswith("xdlm.ops.fused") or file.name.startswith("fused")
                assert not name.startswith("xdlm.serve.web") or file.parent.name == "web"
                assert name.split(".")[0] not in lazy, f"{file}: {name}"


def said_by(script: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_import_is_light() -> None:
    heavy = ("torch", "tokenizers", "tyro", "matplotlib", "rich")
    light = f"dir(xdlm); print([m for m in {heavy} if m in sys.modules])"
    assert said_by(f"import sys, xdlm.cli.main; {light}") == "[]"


def test_parts_are_there_after_a_mere_import() -> None:
    parts = ("data", "evaluation", "models", "noise", "objective", "ops", "report", "sampling", "tokens",
             "training")  # fmt: skip
    found = f"[p for p in {parts} if getattr(xdlm, p).__name__ == f'xdlm.{{p}}']"
    assert said_by(f"import xdlm; print({found})") == str(list(parts))
    listed = f"{{'load', 'Model', 'Vocab', 'UserError', '__version__', *{parts}}} <= set(dir(xdlm))"
    assert said_by(f"import xdlm; print({listed}, hasattr(xdlm, 'nois'))") == "True False"
