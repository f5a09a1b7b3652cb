"""Pickles of engines and stores: what shares one shares one in the other process, too."""

import os
import weakref
from typing import Any

from millpond._millpond import Engine, Store, default_engine

_engines: "weakref.WeakValueDictionary[str, Engine | Store]" = weakref.WeakValueDictionary()
_tokens: "weakref.WeakKeyDictionary[Engine | Store, str]" = weakref.WeakKeyDictionary()


# A worker of a pool gets its store again with each task, and drops it after the task. Its cache is to survive that.
_LOADED_MAX = 8
_loaded: "dict[str, Store]" = {}


def token_of(engine: "Engine | Store") -> str:
    """The name of an engine or a store in all processes that got it by a pickle."""
    token = _tokens.get(engine)
    if token is None:
        token = os.urandom(16).hex()
        _remember(token, engine)
    return token


def _remember(token: str, engine: "Engine | Store") -> None:
    _tokens[engine] = token
    _engines[token] = engine


def load_engine(token: "str | None", settings: "dict[str, Any]") -> Engine:
    """The engine of a pickle: one with the same settings, or the default engine that this process has already."""
    if token is None:
        return default_engine(**settings)
    engine = _engines.get(token)
    if not isinstance(engine, Engine):
        engine = Engine(**settings)
        _remember(token, engine)
    return engine


def load_store(token: str, url: str, settings: "dict[str, Any]") -> Store:
    """The store of a pickle: one with the same settings, and one cache for all pickles of it."""
    store = _engines.get(token)
    if not isinstance(store, Store):
        from millpond._objects import from_settings

        store = from_settings(url, settings)
        _remember(token, store)
    _loaded.pop(token, None)
    _loaded[token] = store
    while len(_loaded) > _LOADED_MAX:
        _loaded.pop(next(iter(_loaded)), None)
    return store
