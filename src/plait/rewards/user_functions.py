"""Finding a user's verifier, "module:function", in the recipe's folder, the working directory, or installed."""

import difflib
import importlib
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from plait.errors import ConfigError, Violation
from plait.rewards.records import VerifierFunction

_SHAPE = "a function that takes a list of samples and returns a list with one score per sample"

_loaded_from: dict[str, str] = {}
"""Files of the modules that were imported here, so that a second recipe's module of the same name is seen."""


def load_function(name: str, recipe_dir: Path | None) -> VerifierFunction:
    """Import the function that "module:function" names; ConfigError says what was looked for and where."""
    module_name, _, function_name = name.partition(":")
    parts = [*module_name.split("."), function_name]
    if not all(part.isidentifier() for part in parts):
        raise _error(name, "is not of the form module:function", 'Write it as "my_module:my_function"')
    folders = _search_folders(recipe_dir)
    module = _import(name, module_name, folders)
    members = vars(module)
    if function_name not in members:
        functions = [key for key, value in members.items() if callable(value) and not key.startswith("_")]
        rule = f'the module "{module_name}" ({_file_of(module)}) has no function "{function_name}"'
        raise _error(name, rule, _nearest(function_name, functions, "It has"))
    _check_shape(name, members[function_name])
    return members[function_name]


def _error(name: str, rule: str, change: str) -> ConfigError:
    return ConfigError([Violation(f'verifier "{name}"', rule, change)])


def _nearest(wanted: str, known: Iterable[str], intro: str) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(wanted, names, n=1)
    listed = f"{intro}: {', '.join(names[:20])}" if names else f"{intro}: nothing"
    return f'Did you mean "{close[0]}"? {listed}' if close else listed


def candidate_files(module_name: str, recipe_dir: Path | None) -> list[Path]:
    """Where a module of that name is looked for before the installed ones, in this order."""
    return _files_of(module_name, _search_folders(recipe_dir))


def _files_of(module_name: str, folders: list[Path]) -> list[Path]:
    stem = Path(*module_name.split("."))
    return [folder / tail for folder in folders for tail in (stem.with_suffix(".py"), stem / "__init__.py")]


def _search_folders(recipe_dir: Path | None) -> list[Path]:
    folders = [] if recipe_dir is None else [recipe_dir.resolve()]
    if Path.cwd() not in folders:
        folders.append(Path.cwd())
    return folders


def _import(name: str, module_name: str, folders: list[Path]) -> ModuleType:
    """Import with the folders first on the path, so that they win over installed modules of that name."""
    _forget_other_recipes_module(name, module_name, folders)
    added = [str(folder) for folder in folders]
    importlib.invalidate_caches()
    sys.path[:0] = added
    try:
        module = _attempt_import(module_name)
    finally:
        for folder in added:
            sys.path.remove(folder)
    if isinstance(module, Exception):
        raise _import_error(name, module_name, folders, module) from module
    # The function may import its neighbours when it is called. Last on the path they shadow nothing.
    sys.path.extend(folder for folder in added if folder not in sys.path)
    _loaded_from[module_name] = _file_of(module)
    return module


def _attempt_import(module_name: str) -> ModuleType | Exception:
    """The module, or what importing it raised."""
    try:
        return importlib.import_module(module_name)
    # A user's module may raise anything when it is imported; the caller reports it as a ConfigError.
    except Exception as error:  # noqa: BLE001
        return error


def _import_error(name: str, module_name: str, folders: list[Path], error: Exception) -> ConfigError:
    missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else None
    if missing is None:
        rule = f'importing "{module_name}" failed with {type(error).__name__}: {error}'
        return _error(name, rule, "Correct the module; importing it must not fail")
    if module_name != missing and not module_name.startswith(missing + "."):
        rule = f'importing "{module_name}" failed: it imports "{missing}", which is not installed'
        return _error(name, rule, f'Install "{missing}" or correct the import')
    nearby = [file.stem for folder in folders for file in folder.glob("*.py")]
    rule = f'there is no module "{module_name}" in {", ".join(map(str, folders))}, and none is installed'
    return _error(name, rule, _nearest(module_name, nearby, "Modules in these folders"))


def _forget_other_recipes_module(name: str, module_name: str, folders: list[Path]) -> None:
    """Make way for a module of these folders where one of the same name was imported from elsewhere."""
    if module_name not in sys.modules:
        return
    wanted = next((file for file in _files_of(module_name, folders) if file.is_file()), None)
    present = _file_of(sys.modules[module_name])
    if wanted is None or Path(present).resolve() == wanted.resolve():
        return
    if module_name not in _loaded_from or _loaded_from[module_name] != present:
        rule = f"{wanted} has the name of a module that is already in use ({present})"
        raise _error(name, rule, "Rename the file")
    del sys.modules[module_name]


def _file_of(module: ModuleType) -> str:
    members = vars(module)
    return str(members["__file__"]) if "__file__" in members else "built in"


def _check_shape(name: str, function: Any) -> None:
    if not callable(function):
        raise _error(name, f"is a {type(function).__name__}, not a function", f"It must be {_SHAPE}")
    for test, kind in (
        (inspect.iscoroutinefunction, "an async function"),
        (inspect.isgeneratorfunction, "a generator function"),
        (inspect.isasyncgenfunction, "an async generator function"),
        (inspect.isclass, "a class"),
    ):
        if test(function):
            raise _error(name, f"is {kind}", f"It must be {_SHAPE}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some compiled functions do not tell their signature
        return
    try:
        signature.bind(())
    except TypeError as error:
        raise _error(name, f"cannot be called with one argument ({error})", f"It must be {_SHAPE}") from error
