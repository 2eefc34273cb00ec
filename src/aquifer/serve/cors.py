"""CORS: which web pages may call the API from a browser.

Browsers ask before a page of another origin may send JSON or an API key (a preflight, an OPTIONS
request without a key), and show the page an answer only if its headers allow that. Without the
middleware no such page gets an answer; programs other than browsers do not ask.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from aquifer.errors import ConfigError

ANY = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,'\"\[\]*]+|[a-z]+://\[[0-9a-f:]+\](:\d+)?", re.I)
_TOKEN = re.compile(r"[\w!#$%&'+.^`|~-]+", re.ASCII)  # RFC 9110, section 5.6.2


@dataclass(frozen=True, slots=True)
class CorsPolicy:
    """The origins, methods and headers that are allowed; `ANY` alone allows all.

    Args:
        origins: scheme, host and port, such as https://chat.example.org.
        methods: HTTP methods, in capitals.
        headers: names of request headers.
        allows_credentials: whether browsers may send cookies.

    Raises:
        ConfigError: an origin, a method or a header is not written as one, or cookies are allowed
            for any origin.
    """

    origins: tuple[str, ...]
    methods: tuple[str, ...] = (ANY,)
    headers: tuple[str, ...] = (ANY,)
    allows_credentials: bool = False

    def __post_init__(self) -> None:
        for origin in self.origins:
            if origin != ANY and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed_origins has {origin!r}; write scheme, host and port without a path, "
                    "such as https://chat.example.org or http://localhost:3000, several separated "
                    "by commas, or * for any"
                )
        for name, values in (("allowed_methods", self.methods), ("allowed_headers", self.headers)):
            for value in values:
                if value != ANY and not _TOKEN.fullmatch(value):
                    raise ConfigError(f"{name} has {value!r}; write names separated by commas")
        if self.allows_credentials and ANY in self.origins:
            raise ConfigError(
                "allow_credentials with the origin * would let any page use the cookies of its "
                "visitors; name the origins in allowed_origins"
            )


def as_browsers_send_it(origin: str) -> str:
    """The origin in small letters, and without the port that its scheme has anyway."""
    lower = origin.lower()
    for scheme, port in (("http://", ":80"), ("https://", ":443")):
        if lower.startswith(scheme):
            return lower.removesuffix(port)
    return lower


def comma_separated(text: str) -> tuple[str, ...]:
    """The parts of a text between commas, without spaces around them and without empty ones."""
    return tuple(part for one in text.split(",") if (part := one.strip()))
