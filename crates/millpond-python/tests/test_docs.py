"""Goal: the examples in docstrings and in docs/python.md run, and show what they print."""

import doctest
import inspect
import re
from pathlib import Path
from typing import Iterator

import millpond
import pytest

MANUAL = Path(__file__).parents[3] / "docs" / "python.md"


def documented() -> Iterator[tuple[str, str]]:
    yield "millpond", millpond.__doc__ or ""
    for name in millpond.__all__:
        item = getattr(millpond, name)
        if isinstance(item, str):
            continue
        yield name, inspect.getdoc(item) or ""
        if inspect.isclass(item):
            for key, value in vars(item).items():
                if not key.startswith("_"):
                    yield f"{name}.{key}", inspect.getdoc(value) or ""


@pytest.mark.parametrize(("name", "text"), list(documented()))
def test_docstring(name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert text, f"{name} has no docstring"
    run(text, name, tmp_path, monkeypatch)


def test_docstring_of_the_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("millpond.fsspec", reason="there is no fsspec")
    run(module.__doc__, "millpond.fsspec", tmp_path, monkeypatch)


def test_all_important_docstrings_have_an_example() -> None:
    with_example = {name for name, text in documented() if ">>>" in text}
    assert {"millpond", "open", "configure", "File", "Engine", "LockedRange", "File.pread"} <= with_example
    assert {"File.preadv", "File.sync", "File.apread", "Engine.open", "Engine.stats"} <= with_example
    assert {"store", "Store", "Store.get", "Store.get_range", "Store.put", "Store.list", "GetResult"} <= with_example


def test_manual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = re.findall(r"^```python\n(.*?)^```$", MANUAL.read_text(), re.MULTILINE | re.DOTALL)
    assert len(examples) >= 4
    monkeypatch.chdir(tmp_path)
    for example in examples:
        if ">>>" in example:
            run(example, "python.md", tmp_path, monkeypatch)
        else:
            exec(compile(example, "python.md", "exec"), {"__name__": "__main__"})


def run(text: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    report: list[str] = []
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    failed = doctest.DocTestRunner(optionflags=flags).run(test, out=report.append).failed
    assert not failed, "".join(report)


def test_signatures_are_those_of_the_stubs() -> None:
    """Each public name is in the stubs, with the same parameters."""
    import ast

    stubs = Path(millpond.__file__).with_name("_millpond.pyi")
    tree = ast.parse(stubs.read_text())
    found: dict[str, list[str]] = {}
    for item in tree.body:
        for function in item.body if isinstance(item, ast.ClassDef) else [item]:
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                scope = f"{item.name}." if isinstance(item, ast.ClassDef) else ""
                arguments = function.args
                all_of_them = arguments.posonlyargs + arguments.args + arguments.kwonlyargs
                found[scope + function.name] = [one.arg for one in all_of_them if one.arg not in ("self", "cls")]
    for name, _ in documented():
        if name.partition(".")[0] in ("store", "s3_endpoint", "S3Endpoint"):
            continue  # in Python, with its types
        item = eval(f"millpond.{name}" if name != "millpond" else "millpond")
        if not callable(item) or inspect.isclass(item):
            continue
        parameters = [one for one in inspect.signature(item).parameters if one != "self"]
        assert found.get(name) == parameters, name
