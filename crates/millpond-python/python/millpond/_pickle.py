"""Pickles of engines: files that share an engine share one in the other process, too."""

import os
import weakref
from typing import Any

from millpond._millpond import Engine, default_engine

_engines: "weakref.WeakValueDictionary[str, Engine]" = weakref.WeakValueDictionary()
_tokens: "weakref.WeakKeyDictionary[Engine, str]" = weakref.WeakKeyDictionary()


def token_of(engine: Engine) -> str:
    """The name of an engine in all processes that got it by a pickle."""
    token = _tokens.get(engine)
    if token is None:
        token = os.urandom(16).hex()
        _tokens[engine] = token
        _engines[token] = engine
    return token


def load_engine(token: "str | None", settings: "dict[str, Any]") -> Engine:
    """The engine of a pickle: this process's default engine, or one with the same settings."""
    if token is None:
        return default_engine()
    engine = _engines.get(token)
    if engine is None:
        engine = Engine(**settings)
        _tokens[engine] = token
        _engines[token] = engine
    return engine
