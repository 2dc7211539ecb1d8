"""The base of every options object, and the bounds of numbers in them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, Self, get_args, get_origin

import msgspec

from pipeline.errors import ConfigError

LEAST, MOST = 1e-9, 1e12
"""Bounds of shares and of seconds: what lies beyond is a mistake, and would end in an infinity somewhere."""


def is_text(value: str) -> bool:
    """Whether a file can hold it: a lone surrogate cannot be written."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every options object.

    ``Class.of({...})`` builds one from plain values (YAML, JSON), ``to_dict`` gives them back.
    """

    @classmethod
    def of(cls, given: Self | Mapping[str, Any] | None = None) -> Self:
        """Build from an object of this class, a mapping of plain values, or nothing (the defaults).

        Raises:
            ConfigError: an unknown name, a wrong type, or a value out of range.
        """
        if isinstance(given, cls):
            return given
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(f"{cls.__name__}: an object of this class or a mapping is needed, not {given!r}")
        values: dict[str, Any] = dict(given or {})
        known = set(cls.__struct_fields__)
        for name in values.keys() - {cls.__struct_config__.tag_field}:
            if name not in known:
                raise ConfigError(
                    f"{cls.__name__} has no option {name!r}; it has {', '.join(sorted(known))}", option=name
                )
        if isinstance(values.get("directory"), os.PathLike):
            values["directory"] = os.fspath(values["directory"])
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            cause = error.__cause__
            if isinstance(cause, ConfigError) and cause.option in known:
                raise cause from None
            cls._check_types(values)
            raise ConfigError(f"{cls.__name__}: {error}") from None

    @classmethod
    def _check_types(cls, values: Mapping[str, Any]) -> None:
        for field in msgspec.structs.fields(cls):
            if field.required and field.name not in values:
                raise ConfigError(f"{cls.__name__}: {field.name}= is needed", option=field.name)
            try:
                msgspec.convert(values.get(field.name, field.default), field.type)
            except msgspec.ValidationError as error:
                choices = get_args(field.type) if get_origin(field.type) is Literal else ()
                allowed = f"{', '.join(map(repr, choices))} are allowed" if choices else str(error)
                raise ConfigError.of(field.name, values[field.name], allowed) from None

    def __post_init__(self) -> None:
        # The class may be called with anything; only `of` has checked the types before.
        self._check_types({name: getattr(self, name) for name in self.__struct_fields__})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that :meth:`of` takes and YAML or JSON keep."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values

    def _text(self, *options: str) -> None:
        for option in options:
            if not is_text(value := getattr(self, option)):
                raise ConfigError.of(option, value, "half a surrogate pair cannot be written into a file")

    def _at_least(self, option: str, least: float, *, none_ok: bool = False) -> None:
        value = getattr(self, option)
        if value is None and none_ok:
            return
        if not least <= value < 2**63:  # what is beyond cannot be written into a manifest
            raise ConfigError.of(option, value, f"must be at least {least} and fit in 64 bits")
