"""`aquifer predict`: train a predictor of output lengths, and report on one.

Heavy packages are imported inside the commands, so that `--help` is quick.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from aquifer.config import ModelSpec
from aquifer.errors import ConfigError
from aquifer.hub import locate

if TYPE_CHECKING:
    from aquifer.predict.data import Example
    from aquifer.predict.train import Encode, Split

app = typer.Typer(no_args_is_help=True, help="Predict how long outputs will be.")

_Files = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE...", help="Served requests: .jsonl with prompt and output_tokens, or a trace."
    ),
]
_Tokenizer = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="Model with the tokenizer that reads the prompts."),
]


@app.command("train")
def _train(
    files: _Files,
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to write the predictor.")],
    tokenizer: _Tokenizer = None,
    encoder: Annotated[
        Literal["compact", "distilbert"], typer.Option(help="Size of the encoder of prompts.")
    ] = "compact",
    pretrained: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="DistilBERT's checkpoint, to begin with its layers."),
    ] = None,
    hold_out: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Model whose outputs are for the test alone; repeat."),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Most rounds over the examples.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and order.")] = 0,
    device: Annotated[str, typer.Option(help="Where to train, such as cuda:0.")] = "cpu",
) -> None:
    """Train a length predictor, for `--length-prediction FOLDER`.

    It writes the predictor, figures of the part that it has not seen, and calibration.png.
    """
    from aquifer.predict.model import LengthPredictor, PredictorConfig
    from aquifer.predict.train import predictions, report, train
    from aquifer.progress import counting_bar

    if pretrained is not None and encoder != "distilbert":
        raise ConfigError("--pretrained needs --encoder distilbert")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output: cannot write {output}: {error.strerror}") from error
    _check_device(device)
    split, fingerprint = _read(files, tokenizer, hold_out or [])
    config = PredictorConfig(encoder, fingerprint, reads_prompts=bool(fingerprint))

    def prepare(predictor: LengthPredictor) -> None:
        if pretrained is not None and predictor.encoder is not None:
            predictor.encoder.load_layers(pretrained)

    with counting_bar() as bar:
        task = bar.add_task("training")
        predictor = train(
            split,
            config,
            epochs=epochs,
            seed=seed,
            device=device,
            prepare=prepare,
            on_progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    lengths = [sample.output_tokens for sample in split.test]
    figures = report(predictions(predictor, split.test), lengths)
    predictor.save(output, figures)
    _show(figures, output / "calibration.png")
    typer.echo(f"the predictor is in {output}")


@app.command("report")
def _report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A trained predictor.")],
    files: _Files,
    tokenizer: _Tokenizer = None,
) -> None:
    """Report how well a predictor does on requests that it may not have seen.

    It writes calibration.png in the current folder.
    """
    from aquifer.predict.model import LengthPredictor
    from aquifer.predict.train import predictions, report, samples_of

    encode, fingerprint = _encoder_of(tokenizer)
    predictor = LengthPredictor.load(folder, fingerprint)
    samples = samples_of(_examples(files), encode)
    lengths = [sample.output_tokens for sample in samples]
    _show(report(predictions(predictor, samples), lengths), Path("calibration.png"))


def _check_device(device: str) -> None:
    """Check that there is such a device, and that it holds numbers.

    Raises:
        ConfigError: it does not.
    """
    import torch

    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device is {device!r}, which cannot be used: {error}") from error


def _read(
    files: Sequence[Path], tokenizer: str | None, hold_out: Sequence[str]
) -> tuple[Split, str]:
    """The samples of files, split; and the tokenizer's fingerprint, "" for lengths alone."""
    from aquifer.predict.train import samples_of, split_of

    encode, fingerprint = _encoder_of(tokenizer)
    examples = _examples(files)
    has_prompts = any(example.has_prompt for example in examples)
    if has_prompts and encode is None:
        raise ConfigError("the examples have prompts; give --tokenizer MODEL to read them")
    split = split_of(examples, samples_of(examples, encode), hold_out)
    return split, fingerprint if has_prompts else ""


def _examples(files: Sequence[Path]) -> list[Example]:
    """Examples of all files; in order of arrival if all have times."""
    from aquifer.predict.data import read_examples

    examples = [example for file in files for example in read_examples(file)]
    if all(example.arrival_s is not None for example in examples):
        examples.sort(key=lambda example: example.arrival_s or 0.0)
    return examples


def _encoder_of(tokenizer: str | None) -> tuple[Encode | None, str]:
    """What turns texts into tokens, and its fingerprint.

    Raises:
        ConfigError: the model has no tokenizer.
    """
    from aquifer.predict.fingerprint import tokenizer_fingerprint
    from aquifer.text import Tokenizer

    if tokenizer is None:
        return None, ""
    (spec,) = locate((ModelSpec.parse(tokenizer),), weights=False)
    found = Tokenizer.load(spec.path)
    if found is None:
        raise ConfigError(f"{spec.path} has no tokenizer.json")
    return found.encode, tokenizer_fingerprint(spec.path)


def _show(figures: dict[str, Any], plot: Path) -> None:
    """Print figures, and draw the calibration."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    for name, text in (
        ("outputs", f"{figures['num_outputs']}"),
        ("mean length", f"{figures['mean_tokens']:.0f} tokens"),
        ("mean absolute error", f"{figures['mean_absolute_error']:.0f} tokens"),
        ("in the likeliest bin", f"{100 * figures['right_bin']:.1f} %"),
        ("calibration error", f"{100 * figures['calibration_error']:.1f} points"),
    ):
        table.add_row(name, text)
    Console().print(table)
    _draw(figures["calibration"], plot)


def _draw(shares: Sequence[float], file: Path) -> None:
    """Draw the share of lengths below each predicted quantile."""
    try:
        import matplotlib as mpl
    except ImportError:
        typer.echo("the calibration is not drawn: matplotlib is not installed")
        return
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(4, 4), layout="constrained")
    levels = [(number + 1) / (len(shares) + 1) for number in range(len(shares))]
    axes.plot([0, 1], [0, 1], color="#cccccc")
    axes.plot(levels, shares, marker="o", color="#1f77b4")
    axes.set_xlabel("predicted: probability that an output is not longer")
    axes.set_ylabel("realised: share of outputs that are not")
    figure.savefig(file, dpi=90)
    plt.close(figure)
