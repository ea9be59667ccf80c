"""Value types that several sections share: counts, shares, texts."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """Frozen, closed and strict: text is never read as a number. The docstring under a field is its reference."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )

    @property
    def changed(self) -> list[str]:
        """Keys whose value is not the default."""
        fields = type(self).model_fields
        return [key for key in fields if getattr(self, key) != fields[key].get_default(call_default_factory=True)]


def match_pattern(pattern: str, what: str) -> AfterValidator:
    """Return a validator: the text must match the whole pattern, which `what` describes in words."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"must be {what}, not {value!r}")
        return value

    return AfterValidator(check)


def _to_whole_number(value: Any) -> Any:
    """1e3 is a whole number although YAML reads it as 1000.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _number_as_text(value: Any) -> Any:
    """1 and 0.5 mean "1" and "0.5"; true and false are ambiguous and stay an error."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Auto = Literal["auto"]  # chosen by the plan or from the data; the key's docstring says what
Count = Annotated[int, Field(ge=1), BeforeValidator(_to_whole_number)]
Natural = Annotated[int, Field(ge=0), BeforeValidator(_to_whole_number)]
Positive = Annotated[float, Field(gt=0)]
Number = Annotated[int | float, Field()]  # stays whole if it is written whole
Share = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
LooseText = Annotated[str, BeforeValidator(_number_as_text, json_schema_input_type=str | float)]
