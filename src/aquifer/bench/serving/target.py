"""The server that is measured: its address, its key, and the models that it lists."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from aquifer.errors import ConfigError

_CONNECT_TIMEOUT_S = 10
_LIST_TIMEOUT_S = 60
_ERROR_CHARACTERS = 300
_EXAMPLE = "write the server's address, such as http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class Target:
    """A server that could be reached.

    Args:
        url: its base URL, without a slash at the end and without `/v1`.
        host: the host of the URL, for certificates.
        address: the IP address to which its name was resolved.
        port: the port.
        prefix: the URL's path, which precedes each endpoint; "" for none.
        netloc: host and port as the URL has them, for the Host header.
        tls: the context of https; None for http.
        api_key: the key, sent as a bearer token; None for none.
    """

    url: str
    host: str
    address: str
    port: int
    prefix: str
    netloc: str
    tls: ssl.SSLContext | None
    api_key: str | None

    @classmethod
    def reach(cls, url: str, api_key: str | None = None) -> Target:
        """Resolve a URL and check that a connection can be opened.

        Args:
            url: the base URL; `/v1` at its end may be left out.
            api_key: the key; None for none.

        Raises:
            ConfigError: the URL or the key is malformed, or there is no server.
        """
        parts, port = _parse(url)
        host = parts.hostname or ""
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError(
                "the API key has characters that a header cannot have; check OPENAI_API_KEY or "
                "--api-key"
            )
        try:
            with socket.create_connection((host, port), _CONNECT_TIMEOUT_S) as connection:
                address = connection.getpeername()[0]
        except (OSError, UnicodeError) as error:  # the latter: no host name at all
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"cannot connect to {url}: {reason}; start the server, or give "
                "its address with --base-url"
            ) from error
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(
            f"{parts.scheme}://{parts.netloc}{prefix}",
            host,
            address,
            port,
            prefix,
            parts.netloc,
            ssl.create_default_context() if parts.scheme == "https" else None,
            api_key,
        )

    @property
    def headers(self) -> dict[str, str]:
        """Headers that every request has."""
        headers = {"Host": self.netloc, "Connection": "close"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return headers

    def post_head(self, endpoint: str, num_bytes: int) -> bytes:
        """Head of a request that posts JSON.

        Args:
            endpoint: the path, such as `/v1/completions`.
            num_bytes: length of the body.
        """
        headers = {
            **self.headers,
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
            "Content-Length": str(num_bytes),
        }
        lines = [f"POST {self.prefix}{endpoint} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode()

    def model_names(self) -> list[str] | None:
        """The names of `/v1/models`; None if the server has no such list.

        Raises:
            ConfigError: the server is not ready, it refused the key, or its answer is not such a
                list.
        """
        status, body = self._get("/v1/models")
        if status in (401, 403):
            raise ConfigError(
                f"{self.url} refused the API key: {error_text(status, body)}; set OPENAI_API_KEY "
                "or give --api-key"
            )
        if status in (404, 405, 501):
            return None
        if status == 503:
            raise ConfigError(
                f"{self.url} is not ready: {error_text(status, body)}; try again when it is"
            )
        try:
            if status == 200:
                return [str(card["id"]) for card in json.loads(body)["data"]]
        except (ValueError, KeyError, TypeError):
            pass
        raise ConfigError(
            f"{self.url}/v1/models is no list of models: {error_text(status, body)}; give the URL "
            "of an OpenAI-compatible server"
        )

    def _get(self, path: str) -> tuple[int, bytes]:
        kinds = (self.host, self.port)
        connection = (
            http.client.HTTPConnection(*kinds, timeout=_LIST_TIMEOUT_S)
            if self.tls is None
            else http.client.HTTPSConnection(*kinds, timeout=_LIST_TIMEOUT_S, context=self.tls)
        )
        try:
            connection.request("GET", self.prefix + path, headers=self.headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(
                f"cannot read {self.url}{path}: {error or type(error).__name__}; give the URL of "
                "an OpenAI-compatible server"
            ) from error
        finally:
            connection.close()


def error_text(status: int, body: bytes) -> str:
    """Status and message of a response that is an error, in one line.

    Args:
        status: the HTTP status.
        body: JSON with the message, in OpenAI's form or another; or any text.
    """
    text = body.decode(errors="replace")
    try:
        content = json.loads(text)
    except ValueError:
        pass
    else:
        text = error_message(content) or text
    text = " ".join(text.split())[:_ERROR_CHARACTERS]
    return f"HTTP {status}: {text}" if text else f"HTTP {status}"


def error_message(content: object) -> str | None:
    """The message of an error's JSON; None if it has none."""
    if not isinstance(content, dict):
        return None
    found = content.get("error") or content.get("message") or content.get("detail")
    if isinstance(found, dict):
        found = found.get("message") or json.dumps(found)
    return None if found is None else str(found)


def _parse(url: str) -> tuple[SplitResult, int]:
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        raise ConfigError(f"--base-url is {url!r}; {_EXAMPLE}") from None
    is_plain = parts.username is None and not parts.query and not parts.fragment
    if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain:
        raise ConfigError(f"--base-url is {url!r}; {_EXAMPLE}")
    return parts, port
