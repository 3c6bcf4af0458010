"""Importing is free: no framework, no side effects; control and data need numpy alone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import omnilearn


def fresh(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def loaded(statement: str) -> set[str]:
    """Top-level packages that a statement loads in a fresh interpreter."""
    code = (
        "import sys, json; before = set(sys.modules)\n"
        f"{statement}\n"
        "print(json.dumps(sorted({m.split('.')[0] for m in set(sys.modules) - before})))"
    )
    return set(json.loads(fresh(code)))


def test_import_omnilearn_loads_nothing() -> None:
    packages = loaded("import omnilearn")
    assert packages.isdisjoint({"torch", "tensorflow", "numpy", "rich"})
    assert packages <= {"omnilearn"} | sys.stdlib_module_names


@pytest.mark.parametrize("package", ["omnilearn.control", "omnilearn.data", "omnilearn.engine.loop"])
def test_control_and_data_need_numpy_alone(package: str) -> None:
    assert loaded(f"import {package}") <= {"omnilearn", "numpy"} | sys.stdlib_module_names | _of_numpy()


def _of_numpy() -> set[str]:
    """What numpy itself brings along (compiled helpers differ between its versions)."""
    return loaded("import numpy, numpy.typing")


def test_errors_and_the_command_line_load_no_framework() -> None:
    frameworks = {"torch", "tensorflow"}
    assert loaded("from omnilearn import InfeasibleError, OmniLearnError, PeerFailure").isdisjoint(
        {*frameworks, "numpy"}
    )
    assert loaded("import omnilearn.cli; omnilearn.cli.build_parser()").isdisjoint({*frameworks, "numpy"})
    assert loaded("import omnilearn.cli; omnilearn.cli.build_parser('bench')").isdisjoint(frameworks)


@pytest.mark.parametrize(("mine", "other"), [("tensorflow", "torch"), ("pytorch", "tensorflow")])
def test_a_framework_does_not_load_the_other(mine: str, other: str) -> None:
    pytest.importorskip({"pytorch": "torch", "tensorflow": "keras"}[mine])
    code = f"import sys, omnilearn.{mine}; print({other!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "False\n"


def test_no_side_effects() -> None:
    code = """
import logging, multiprocessing, os, signal, sys, threading, warnings
def state():
    return (dict(os.environ), os.getcwd(), list(sys.path), sys.excepthook, sys.getswitchinterval(),
            list(logging.root.handlers), logging.root.level, logging.raiseExceptions, list(warnings.filters),
            multiprocessing.get_start_method(allow_none=True), threading.active_count(),
            signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), os.umask(os.umask(0o22)))
import numpy
before = state()
import omnilearn, omnilearn.control, omnilearn.data, omnilearn.errors, omnilearn.cli
assert state() == before
print("same")
"""
    assert fresh(code) == "same\n"


def test_lazily_loaded_names_are_listed() -> None:
    listed = json.loads(fresh("import json, omnilearn; print(json.dumps(dir(omnilearn)))"))
    assert {"OmniLearn", "OmniLearnError", "InfeasibleError", "PeerFailure", "__version__"} <= set(listed)
    assert set(omnilearn.__all__) <= set(listed)


def test_lazily_loaded_names_are_the_real_ones() -> None:
    from omnilearn import errors

    assert omnilearn.InfeasibleError is errors.InfeasibleError
    assert omnilearn.OmniLearnError is errors.OmniLearnError
    with pytest.raises(AttributeError, match="'omnilearn' has no attribute 'OmniLern'"):
        _ = omnilearn.OmniLern  # type: ignore[attr-defined]
    with pytest.raises(ImportError):
        from omnilearn import nothing  # type: ignore[attr-defined]  # noqa: F401
