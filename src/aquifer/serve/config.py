"""The options of the server: devices and the HTTP side."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address

from aquifer.config import check_fields
from aquifer.errors import ConfigError
from aquifer.options import default_of, find_option
from aquifer.serve.cors import ANY, CorsPolicy, as_browsers_send_it, comma_separated
from aquifer.serve.request_log import RequestLog

LAST_BYTES_S = 5
"""After the last request ended, for its response to reach a slow client."""

BACKLOG = 2048
"""Connections that wait in the kernel to be accepted."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The options of the server beside those of its engines; `OPTIONS` describes them.

    Raises:
        ConfigError: a value is not allowed.
    """

    host: str = default_of("host")
    port: int = default_of("port")
    devices: str | None = default_of("devices")
    workers: int | None = default_of("workers")
    placement: str = default_of("placement")
    api_server_count: int = default_of("api_server_count")
    api_key: str | None = default_of("api_key")
    api_key_for_all: bool = default_of("api_key_for_all")
    prefix_cache_salt_by_key: bool | None = default_of("prefix_cache_salt_by_key")
    chat_template: str | None = default_of("chat_template")
    trust_request_chat_template: bool = default_of("trust_request_chat_template")
    allowed_origins: str | None = default_of("allowed_origins")
    allowed_methods: str | None = default_of("allowed_methods")
    allowed_headers: str | None = default_of("allowed_headers")
    allow_credentials: bool = default_of("allow_credentials")
    enable_tokenizer_info_endpoint: bool = default_of("enable_tokenizer_info_endpoint")
    log_level: str = default_of("log_level")
    disable_log_stats: bool = default_of("disable_log_stats")
    enable_log_requests: bool = default_of("enable_log_requests")
    max_log_len: int | None = default_of("max_log_len")
    shutdown_timeout_s: float = default_of("shutdown_timeout")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.api_key is not None and not self.api_keys:
            raise ConfigError("api_key contains no key; leave it out to require none")
        if self.api_key_for_all and not self.api_keys:
            raise ConfigError("api_key_for_all needs api_key; without one all paths are open")
        self._check_devices()
        self._check_cors()
        if self.enable_log_requests and self.log_level in ("warning", "error"):
            raise ConfigError(
                f"enable_log_requests logs at level info, and log_level is {self.log_level}; set "
                "log_level to info or debug"
            )
        if self.max_log_len is not None and not self.enable_log_requests:
            raise ConfigError("max_log_len needs enable_log_requests")

    def _check_devices(self) -> None:
        names = self.device_names
        if self.devices is not None and not names:
            raise ConfigError("devices names none; write them such as cuda:0,cuda:1")
        for name in names:
            if name in ("auto", "cuda"):
                raise ConfigError(f"devices has {name!r}; number each GPU, such as cuda:0,cuda:1")
            find_option("device").parse(name, "devices")
            if name != "cpu" and names.count(name) > 1:
                raise ConfigError(f"devices has {name} several times; one process serves a GPU")
        if names and self.workers is not None:
            raise ConfigError("devices and workers are both given; leave one of them out")
        if self.workers is not None:
            return
        if self.placement != default_of("placement") and len(names) < 2:
            raise ConfigError("placement needs several devices, such as devices cuda:0,cuda:1")

    def _check_cors(self) -> None:
        if self.cors is not None:
            return
        for name in ("allowed_methods", "allowed_headers", "allow_credentials"):
            if getattr(self, name) != default_of(name):
                raise ConfigError(f"{name} needs allowed_origins, such as https://chat.example.org")

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The valid API keys; empty if no key is required."""
        return comma_separated(self.api_key or "")

    @property
    def device_names(self) -> tuple[str, ...]:
        """The devices; empty for that of the engine's options."""
        return comma_separated(self.devices or "")

    @property
    def may_change_models(self) -> bool:
        """Whether clients may register models of any path, and remove models.

        They need an API key, or must be on this machine.
        """
        if self.api_keys or self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def cors(self) -> CorsPolicy | None:
        """What web pages of other origins may do; None for nothing."""
        if self.allowed_origins is None:
            return None
        origins = tuple(map(as_browsers_send_it, comma_separated(self.allowed_origins)))
        if not origins:
            raise ConfigError("allowed_origins contains no origin; leave it out to allow none")
        methods = comma_separated((self.allowed_methods or ANY).upper())
        headers = comma_separated(self.allowed_headers or ANY)
        return CorsPolicy(origins, methods, headers, self.allow_credentials)

    @property
    def request_log(self) -> RequestLog | None:
        """The log of requests; None if they are not logged."""
        return RequestLog(self.max_log_len) if self.enable_log_requests else None

    @property
    def salts_by_key(self) -> bool:
        """Whether clients with different API keys share no retained prefixes."""
        if self.prefix_cache_salt_by_key is None:
            return len(self.api_keys) > 1
        return self.prefix_cache_salt_by_key
