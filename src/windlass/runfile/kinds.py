"""Value types that several sections share: counts, names, paths, quantities."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """Frozen, closed and strict: text is never read as a number. The docstring under a field is its reference."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),  # `model_name_or_path` is upstream's name and ours
        defer_build=True,
    )


def _whole(value: Any) -> Any:
    """1e3 is a whole number although YAML reads it as 1000.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _number_as_text(value: Any) -> Any:
    """1 and 0.5 mean "1" and "0.5"; true and false are ambiguous and stay an error."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _matches(pattern: str, what: str) -> AfterValidator:
    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"must be {what}, not {value!r}")
        return value

    return AfterValidator(check)


Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
Natural = Annotated[int, Field(ge=0), BeforeValidator(_whole)]
Positive = Annotated[float, Field(gt=0)]
Number = Annotated[int | float, Field()]  # stays whole if it is written whole
Share = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
LooseText = Annotated[str, BeforeValidator(_number_as_text, json_schema_input_type=str | float)]

# RFC 1123: what Kubernetes accepts as the name of an object, and of a label's part.
LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
SUBDOMAIN = rf"(?=.{{1,253}}$){LABEL}(\.{LABEL})*"

# The name of a run becomes the name of a job, and a JobSet's pods append `-node-0-99-abcde` to that: 63 - 16.
RUN_NAME_LETTERS = 47
RunName = Annotated[
    str,
    _matches(
        rf"[a-z]([-a-z0-9]{{0,{RUN_NAME_LETTERS - 2}}}[a-z0-9])?",
        f"at most {RUN_NAME_LETTERS} lower-case letters, digits and dashes, starting with a letter, no dash last",
    ),
]
Label = Annotated[str, _matches(LABEL, "at most 63 lower-case letters, digits and dashes, no dash first or last")]
Subdomain = Annotated[str, _matches(SUBDOMAIN, "lower-case letters, digits, dashes and dots (RFC 1123)")]
Qualified = Annotated[
    str,
    _matches(
        r"([a-z0-9][-a-z0-9.]{0,251}[a-z0-9]/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?",
        "a name such as `rdma/nic`, with at most 63 letters, digits, dashes, dots and underscores after the slash",
    ),
]
AbsolutePath = Annotated[str, _matches(r"/[^\n]*", "an absolute path, starting with /")]
Quantity = Annotated[
    str, _matches(r"\d{1,15}(\.\d{1,9})?(m|k|[MGTPE]|[KMGTPE]i)", "an amount with its unit, such as 64G or 500Gi")
]
Cpus = Annotated[LooseText, _matches(r"\d{1,6}(\.\d{1,3}|m)?", "a number of CPUs such as 8, 0.5 or 500m")]
Variable = Annotated[str, _matches(r"[A-Za-z_][A-Za-z0-9_]*", "a variable's name: letters, digits and underscores")]
Image = Annotated[str, _matches(r"[!-~]{1,1024}", "an image's name, without spaces")]
Release = Annotated[str, _matches(r"\d{1,4}\.\d{1,4}", 'a version such as "2.3", in quotes')]
SecretKey = Annotated[str, _matches(r"[-._a-zA-Z0-9]{1,253}", "letters, digits, dashes, dots and underscores")]
