"""Where pydantic is not installed: settings with their defaults. Their names are checked, their values are not."""

from __future__ import annotations

from typing import Any

ConfigDict = dict


class ValidationError(ValueError):
    def __init__(self, name: str, value: Any):
        self.found = {"loc": (name,), "type": "extra_forbidden", "input": value, "msg": "unknown"}
        super().__init__(name)

    def errors(self) -> list[dict[str, Any]]:
        return [self.found]


def Field(**bounds: Any) -> None:
    """Bounds of a value."""


def BeforeValidator(check: Any) -> None:
    """How text becomes a value."""


def AllowInfNan(allowed: bool) -> None:
    """Whether a number may be infinite or none, which is not checked here."""


def AfterValidator(check: Any) -> None:
    """What a value must be, which is not checked here."""


class ValidationInfo:
    """What a check of one value is told besides."""


def field_validator(*names: str, mode: str) -> Any:
    """A check of one value, which is not made here."""
    return lambda check: check


def model_validator(mode: str) -> Any:
    """A check of a whole model, which is not made here."""
    return lambda check: check


class BaseModel:
    """Fields by annotation, those of its parents before its own."""

    model_fields: dict[str, Any] = {}  # noqa: RUF012  each class has its own

    def __init_subclass__(cls) -> None:
        own = (name for name in cls.__annotations__ if not name.startswith("model_"))
        cls.model_fields = cls.model_fields | {name: getattr(cls, name, None) for name in own}

    def __init__(self, **values: Any):
        for name, value in values.items():
            if name not in self.model_fields:
                raise ValidationError(name, value)
            self.__dict__[name] = value
        self.model_fields_set = set(values)

    def model_dump(self, exclude_unset: bool = False) -> dict[str, Any]:
        names = self.model_fields_set if exclude_unset else self.model_fields
        return {name: getattr(self, name) for name in names}
