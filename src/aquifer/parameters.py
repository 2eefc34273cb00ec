"""Parameters of commands, made from options; and their values, from wherever they are set."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer
import yaml

from aquifer.config import ModelSpec
from aquifer.errors import ConfigError
from aquifer.option import Option, Scope
from aquifer.options import options_of

PRECEDENCE = (
    "Each option can also be set in the environment, such as AQUIFER_MAX_MODEL_LEN=4096; several "
    "values are separated by commas. "
    "The command line wins over the environment"
)
"""Shown at the end of the help of commands that read the environment."""


def _check_model(model: str) -> str:
    """Check that there may be such a model, before a command imports anything heavy."""
    ModelSpec.parse(model).check_path()
    return model


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Path of a checkpoint, ORG/NAME of the Hugging Face hub, or 'demo'.",
        callback=_check_model,
    ),
]

_ALIASES = {"model": "models"}  # other names that a YAML file may use


def with_options(
    options: Sequence[Option], *, environment: bool = False, config_file: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a command that takes these options beside its own parameters.

    The function gets the values as attributes of the keyword argument `options`.

    Args:
        options: what the command takes.
        environment: whether options may be set by variables, `AQUIFER_NAME`.
        config_file: whether the command also takes `--config FILE`, a YAML file of options.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        parameters = [
            inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
            *(_keyword_only(parameter) for name, parameter in own.items() if name != "options"),
            *map(_parameter, options),
            *([_CONFIG] if config_file else []),
        ]

        @functools.wraps(command)
        def run(context: typer.Context, **given: Any) -> None:
            file = given.pop("config", None) if config_file else None
            flags = {option.name: given.pop(option.name) for option in options}
            flags = {name: value for name, value in flags.items() if _is_given(context, name)}
            variables = os.environ if environment else {}
            values = read_options(options, flags, variables, file)
            command(**given, options=SimpleNamespace(**values))

        # typer reads these two.
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def values_for(scope: Scope, options: SimpleNamespace) -> dict[str, Any]:
    """The options of an interface among those of a command, by name; to open `LLM` with."""
    names = [option.name for option in options_of(scope)]
    return {name: getattr(options, name) for name in names if hasattr(options, name)}


def read_options(
    options: Sequence[Option],
    flags: Mapping[str, Any],
    variables: Mapping[str, str],
    file: Path | None = None,
) -> dict[str, Any]:
    """The value of each option, by name.

    Flags win over environment variables, these over the file, and that over defaults.

    Args:
        options: what may be set.
        flags: what the command line sets, by option name.
        variables: the environment; an empty variable sets nothing, and commas separate several
            values of one.
        file: a YAML file of options, and of those of `serve` that this command does not take; None
            for none.

    Raises:
        ConfigError: a value is not allowed, or the file has an unknown key; the message names the
            flag, variable or file, and values that are allowed.
    """
    values = {option.name: option.default for option in options}
    in_file = {} if file is None else _read_file(file, options)
    for option in options:
        if option.name in flags:
            source = "MODEL" if option.is_argument else option.flag
            values[option.name] = _parse(option, flags[option.name], source)
        elif variables.get(option.variable) and not option.is_argument:
            values[option.name] = _parse(option, _of_variable(option, variables), option.variable)
        elif option.name in in_file:
            source = f"{file}: {option.name}"
            values[option.name] = _parse(option, in_file[option.name], source)
    return values


def _of_variable(option: Option, variables: Mapping[str, str]) -> str | list[str]:
    """What a variable sets: of an option with several values, those between commas."""
    text = variables[option.variable]
    return [value.strip() for value in text.split(",")] if option.many else text


def _parse(option: Option, value: object, source: str) -> Any:
    """The value that a source sets; the text of the file, if it names one."""
    parsed = option.parse(value, source)
    if option.unit != "file" or option.type is not str or parsed is None:
        return parsed
    try:
        return Path(parsed).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{source}: cannot read {parsed}: {error}; give the path of a text file"
        ) from error


def _read_file(file: Path, options: Sequence[Option]) -> dict[str, Any]:
    """What a YAML file sets, by option name.

    A command that takes a part of the options of `serve` can be given a server's file: it uses that
    part of it.
    """
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config: cannot read {file}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold options, one a line, like 'port: 8000'")
    known = {option.name for option in (*options, *options_of("serve"))}
    values = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        name = _ALIASES.get(name, name)
        if name not in known:
            raise ConfigError(f"{file}: unknown key {key!r}; there is {', '.join(sorted(known))}")
        if name in values:
            raise ConfigError(f"{file} sets {name} twice; leave out {key!r}")
        values[name] = value
    return values


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether the option is on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _parameter(option: Option) -> inspect.Parameter:
    """The parameter from which typer makes a flag or an argument.

    Its type is text, switches aside: `Option.parse` reads the values of all sources alike.
    """
    kind: Any
    if option.is_argument:
        metavar = f"{option.metavar}..." if option.many else option.metavar
        info = typer.Argument(metavar=metavar, help=option.help, show_default=False)
    elif option.type is bool:
        declaration = f"{option.flag}/--no-{option.flag.removeprefix('--')}"
        info = typer.Option(declaration, help=option.help)
    else:
        flags = (option.flag, option.short) if option.short else (option.flag,)
        info = typer.Option(
            *flags,
            metavar=option.metavar,
            help=option.help,
            show_default=option.unset or True,
        )
    if option.type is bool:
        kind, default = bool, option.default
    elif option.many:
        kind, default = list[str], list(option.default)
    else:
        kind, default = str | None, option.default_text or None
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, info],
    )


def _keyword_only(parameter: inspect.Parameter) -> inspect.Parameter:
    return parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)


_CONFIG = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="YAML file that sets options, such as 'port: 8000'."),
    ],
)
