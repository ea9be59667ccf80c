"""Kinds of values that several sections share. Strict: what YAML calls text is never taken for a number."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """Frozen, closed, strict; the docstring under a field is its reference and its help."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),  # `model_name_or_path` is upstream's name and ours
        defer_build=True,
    )


def _whole(value: Any) -> Any:
    """1e3 is a whole number although YAML reads it as 1000.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _matches(pattern: str, what: str) -> AfterValidator:
    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"must be {what}, not {value!r}")
        return value

    return AfterValidator(check)


Whole = Annotated[int, BeforeValidator(_whole)]
"""A whole number, also where it is written 1e3."""
Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
"""A whole number of at least 1."""
Natural = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
"""A whole number of at least 0."""
Number = Annotated[int | float, Field()]
"""A number that stays whole where it is written whole."""
Share = Annotated[float, Field(ge=0, le=1)]
"""A share between 0 and 1."""
Text = Annotated[str, Field(min_length=1)]
"""Text that is not empty."""

# RFC 1123: what Kubernetes takes as the name of an object, and of a label's part.
LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
SUBDOMAIN = rf"(?=.{{1,253}}$){LABEL}(\.{LABEL})*"

# The name of a run becomes the name of a job, and a JobSet's pods append `-node-0-99-abcde` to that: 63 - 16.
RUN_NAME_LETTERS = 47
RunName = Annotated[
    str,
    _matches(
        rf"[a-z]([-a-z0-9]{{0,{RUN_NAME_LETTERS - 2}}}[a-z0-9])?",
        f"at most {RUN_NAME_LETTERS} small letters, digits and dashes, beginning with a letter and not ending with a "
        "dash",
    ),
]
Label = Annotated[str, _matches(LABEL, "at most 63 small letters, digits and dashes, neither first nor last a dash")]
Subdomain = Annotated[str, _matches(SUBDOMAIN, "small letters, digits, dashes and dots (RFC 1123)")]
Qualified = Annotated[
    str,
    _matches(
        r"([a-z0-9][-a-z0-9.]{0,251}[a-z0-9]/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?",
        "a name such as `rdma/nic`, at most 63 letters, digits, dashes, dots and underscores after the slash",
    ),
]
AbsolutePath = Annotated[str, _matches(r"/[^\n]*", "an absolute path, beginning with /")]
Quantity = Annotated[
    str,
    _matches(
        r"\d{1,15}(\.\d{1,9})?(m|k|[MGTPE]|[KMGTPE]i)",
        "an amount with its unit, such as 500m, 64G or 500Gi (a bare number would be bytes)",
    ),
]
Processors = Annotated[str, _matches(r"\d{1,6}(\.\d{1,3}|m)?", "a number of processors such as 8, 0.5 or 500m")]
Variable = Annotated[str, _matches(r"[A-Za-z_][A-Za-z0-9_]*", "a variable's name: letters, digits and underscores")]
Image = Annotated[str, _matches(r"[!-~]{1,1024}", "an image's name, without spaces")]
Release = Annotated[str, _matches(r"\d{1,4}\.\d{1,4}", 'a version such as "2.3", in quotes')]
SecretKey = Annotated[str, _matches(r"[-._a-zA-Z0-9]{1,253}", "letters, digits, dashes, dots and underscores")]
