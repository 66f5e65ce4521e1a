"""Keywords that a function does not take: the error says where the setting stands instead."""

import difflib
import functools
import inspect
from typing import Any, Callable, Mapping, TypeVar, cast

from .errors import ArgumentError

F = TypeVar("F", bound=Callable[..., Any])


def explains_keywords(elsewhere: "Mapping[str, str]") -> "Callable[[F], F]":
    """A decorator. An unknown keyword is an ArgumentError: with the remedy that `elsewhere` has for it, else with the keyword
    that is closest."""
    def decorate(function: F) -> F:
        known = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            for keyword in keywords:
                if keyword not in known:
                    close = difflib.get_close_matches(keyword, known, 1)
                    remedy = elsewhere.get(keyword) or (f"did you mean {close[0]}?" if close
                                                        else f"it takes {', '.join(known[2:])}")
                    raise ArgumentError(f"{function.__name__}() takes no {keyword}: {remedy}")
            return function(*arguments, **keywords)
        return cast(F, call)
    return decorate
