"""Python functions that a model may call: what it is told of them, and how they are called."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_type_hints

import anyio.to_thread
import msgspec

from pipeline.errors import ConfigError
from tasks.chat.text import cleaned


class Tool:
    """A function that a model may call.

    Its name, its docstring and the types of its parameters are what the model is told. A plain ``def`` runs in a
    thread. What it returns is sent back: text as it is, everything else as JSON.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises:
        ConfigError: parameters that cannot be described: without a name, or of a type that JSON has not.
        """
        self.function = function
        self.name: str = getattr(function, "__name__", type(function).__name__)
        self._arguments = self._struct_of(function)
        try:
            schema = msgspec.json.schema(self._arguments)
        except TypeError as error:
            raise ConfigError(f"tool {self.name!r}: {error}", option="tools") from None
        found = {**schema, **schema["$defs"].pop(self._arguments.__name__)}
        found = {name: each for name, each in found.items() if name not in ("$ref", "title") and each != {}}
        described = inspect.getdoc(function) or ""
        self.spec = {
            "type": "function",
            "function": {"name": self.name, "description": described, "parameters": found},
        }

    def _struct_of(self, function: Callable[..., Any]) -> Any:
        hints = get_type_hints(function)
        fields: list[Any] = []
        for name, each in inspect.signature(function).parameters.items():
            if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD, each.POSITIONAL_ONLY):
                raise ConfigError(
                    f"tool {self.name!r}: parameter {each}: a model names what it gives; use named parameters",
                    option="tools",
                )
            kind = hints.get(name, Any)
            fields.append((name, kind) if each.default is each.empty else (name, kind, each.default))
        return msgspec.defstruct(f"{self.name}_arguments", fields, kw_only=True, forbid_unknown_fields=True)

    def _given(self, arguments: str) -> Any:
        try:
            return msgspec.json.decode(arguments, type=self._arguments)
        except ValueError as error:
            try:  # a model may say half a surrogate pair, as it is or escaped
                value = cleaned(json.loads(arguments))
            except (ValueError, RecursionError):
                raise error from None
            return msgspec.json.decode(msgspec.json.encode(value), type=self._arguments)

    async def call(self, arguments: str) -> str:
        """Call it with arguments in JSON, and return what the model is told: the result, or ``error: ...`` if the
        arguments do not fit or it raised."""
        try:
            given = self._given(arguments or "{}")
        except (ValueError, RecursionError) as error:
            return f"error: the arguments do not fit: {error}"
        named = {name: getattr(given, name) for name in self._arguments.__struct_fields__}
        try:
            if inspect.iscoroutinefunction(self.function):
                result = await self.function(**named)
            else:
                result = await anyio.to_thread.run_sync(partial(self.function, **named))
        except Exception as error:  # a tool's failure is something that the model is to deal with
            return f"error: {type(error).__name__}: {error}"
        return result if isinstance(result, str) else msgspec.json.encode(result, enc_hook=str).decode()


def tools_of(given: Any) -> Mapping[str, Tool]:
    """Return tools by name, of functions or :class:`Tool`.

    Raises:
        ConfigError: two have one name, or one cannot be described.
    """
    found: dict[str, Tool] = {}
    for each in given:
        tool = each if isinstance(each, Tool) else Tool(each)
        if tool.name in found:
            raise ConfigError(f"tool {tool.name!r}: there are two of this name", option="tools")
        found[tool.name] = tool
    return found
