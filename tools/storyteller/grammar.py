"""The story grammar: generates stories and chats from the text files beside it.

The sentences are in ``words.txt``, ``stories.txt`` and ``chats.txt``, where they can be read and
edited as prose. This module chooses among them and keeps a story consistent.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent

Row = dict[str, str]
Message = dict[str, str]


# Templates -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """A word of the current story, such as ``{hero}``."""

    key: str


@dataclass(frozen=True)
class Call:
    """A reference to a shared phrase, such as ``<end>``."""

    rule: str


@dataclass(frozen=True)
class Choice:
    """One of several alternatives, such as ``[big|small]``."""

    options: "tuple[Sequence, ...]"


Sequence = tuple[str | Slot | Call | Choice, ...]

_TOKEN = re.compile(r"[\[\]|]|\{\w+\}|<\w+>|[^\[\]|{}<>]+")


@cache
def parse(text: str) -> Sequence:
    """Parse a template; cached, because each is expanded many thousand times."""
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != text:
        raise ValueError(f"stray bracket in {text!r}")
    sequences, position = _parse_options(tokens, 0)
    if position != len(tokens) or len(sequences) != 1:
        raise ValueError(f"unbalanced bracket in {text!r}")
    return sequences[0]


def _parse_options(tokens: list[str], position: int) -> tuple[list[Sequence], int]:
    """Parse alternatives up to the closing bracket or the end of the text."""
    options: list[Sequence] = []
    parts: list[str | Slot | Call | Choice] = []
    while position < len(tokens) and tokens[position] != "]":
        token = tokens[position]
        if token == "[":
            inner, position = _parse_options(tokens, position + 1)
            if position == len(tokens):
                raise ValueError(f"unbalanced bracket in {''.join(tokens)!r}")
            parts.append(Choice(tuple(inner)))
        elif token == "|":
            options.append(tuple(parts))
            parts = []
        elif token[0] == "{":
            parts.append(Slot(token[1:-1]))
        elif token[0] == "<":
            parts.append(Call(token[1:-1]))
        else:
            parts.append(token)
        position += 1
    options.append(tuple(parts))
    return options, position


# Files -----------------------------------------------------------------------------------------


@dataclass
class Step:
    """One step of a plot: a choice of sentences, possibly optional or after a paragraph break."""

    optional: bool = False
    paragraph: bool = False
    variants: list[str] = field(default_factory=list)


@dataclass
class Plot:
    """A story's steps, with titles, requests, summaries and questions about it."""

    titles: list[str] = field(default_factory=list)
    asks: list[str] = field(default_factory=list)
    shorts: list[str] = field(default_factory=list)
    questions: list[tuple[str, str]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


@dataclass(frozen=True)
class Grammar:
    """The content of the three text files."""

    tables: dict[str, list[Row]]
    rules: dict[str, list[str]]
    plots: dict[str, Plot]

    @property
    def story_plots(self) -> list[str]:
        """Names of the plots that can be requested; the others only continue a story."""
        return [name for name, plot in self.plots.items() if plot.asks]


def _lines(name: str) -> Iterator[str]:
    """Yield a file's lines without comments; empty lines are kept, because they end a step."""
    for line in (HERE / name).read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            yield line.rstrip()


def _read_tables() -> dict[str, list[Row]]:
    """Read words.txt."""
    tables: dict[str, list[Row]] = {}
    columns: list[str] = []
    rows: list[Row] = []
    for line in _lines("words.txt"):
        if line.startswith("%% "):
            name, _, header = line[3:].partition(": ")
            columns = header.split(" ;; ")
            rows = tables.setdefault(name, [])
        elif line:
            rows.append(dict(zip(columns, line.split(" ;; "), strict=True)))
    return tables


def _read_plot_line(plot: Plot, line: str, step: Step | None) -> Step | None:
    """Add one line to a plot and return the step that the next line belongs to."""
    word, _, rest = line.partition(" ")
    match word:
        case "title":
            plot.titles.append(rest)
        case "ask":
            plot.asks.append(rest)
        case "short":
            plot.shorts.append(rest)
        case "qa":
            question, _, answer = rest.partition(" => ")
            plot.questions.append((question, answer))
        case "":
            return None
        case "--":
            return Step(paragraph=True)
        case "?":
            return Step(optional=True, paragraph=bool(step and step.paragraph))
        case _:
            step = step or Step()
            if not step.variants:
                plot.steps.append(step)
            step.variants.append(line)
    return step


@cache
def load() -> Grammar:
    """Read the three files; cached."""
    rules: dict[str, list[str]] = {}
    plots: dict[str, Plot] = {}
    variants: list[str] = []
    plot: Plot | None = None
    step: Step | None = None
    for name in ("stories.txt", "chats.txt"):
        for line in _lines(name):
            if line.startswith(":: "):
                plot = None
                variants = rules.setdefault(line[3:], [])
            elif line.startswith("== "):
                plot, step = plots.setdefault(line[3:], Plot()), None
            elif plot is not None:
                step = _read_plot_line(plot, line, step)
            elif line:
                variants.append(line)
    return Grammar(_read_tables(), rules, plots)


# Characters ------------------------------------------------------------------------------------

_PRONOUNS = {
    "she": {"he": "she", "him": "her", "his": "her", "himself": "herself"},
    "he": {"he": "he", "him": "him", "his": "his", "himself": "himself"},
}


def with_article(noun: str) -> str:
    """Put "a" or "an" before a noun phrase; "a" before "uni"."""
    vowel = noun[0] in "aeiou" and not noun.startswith("uni")
    return f"{'an' if vowel else 'a'} {noun}"


def capitalise(text: str) -> str:
    """Capitalise the first letter, also after an opening quotation mark."""
    return re.sub(r"^\W*[a-z]", lambda match: match.group().upper(), text)


def title_case(text: str) -> str:
    """Capitalise the words of a title, except the small ones inside it."""
    small = {"a", "an", "and", "the", "to", "of", "for", "in", "at", "with", "by"}
    words = text.split()
    cased = [w if i and w in small else capitalise(w) for i, w in enumerate(words)]
    return " ".join(cased)


@dataclass(frozen=True)
class Character:
    """A character of a story, and the ways to mention it."""

    kind: str
    adjective: str
    name: str
    gender: str
    row: Row

    @property
    def described(self) -> str:
        """The kind with its adjective, such as "little fox"."""
        return f"{self.adjective} {self.kind}"

    def introduce(self, rng: random.Random) -> str:
        """Write the first mention, with the indefinite article."""
        link = rng.choice(("named", "named", "called"))
        return with_article(f"{self.described} {link} {self.name}" if self.name else self.described)

    def mention(self, rng: random.Random) -> str:
        """Write a later mention: mostly the name, sometimes the kind."""
        if self.name and rng.random() < 0.88:
            return self.name
        return f"the {self.described}" if rng.random() < 0.3 else f"the {self.kind}"

    @property
    def call(self) -> str:
        """The form by which others address this character."""
        return self.name or self.described


_YOUNG = {"girl", "boy", "princess", "prince", "kitten", "puppy", "lamb", "chick", "calf", "foal"}


def _fits(adjective: str, kind: str, *, human: bool) -> bool:
    """Whether an adjective suits a character: no tiny giants, old kittens or grey girls."""
    if kind == "giant" and adjective in {"little", "small", "tiny"}:
        return False
    if kind in _YOUNG and "old" in adjective:
        return False
    return not (human and adjective in {"grey", "tiny", "big"}) or kind == "giant"


def _invented_name(rng: random.Random) -> str:
    """Make up a name, so that the model learns to copy names that it has not seen."""
    starts = ("B", "D", "F", "G", "K", "L", "M", "N", "P", "R", "S", "T", "V", "Z", "Br", "Tr")
    middles = ("a", "e", "i", "o", "u", "ee", "oo", "ai")
    joints = ("b", "d", "l", "ll", "m", "n", "nd", "r", "t", "v", "z", "x", "k", "pp")
    ends = ("a", "o", "i", "y", "el", "in", "ix", "on", "um", "ette")
    pieces = [rng.choice(starts), rng.choice(middles)]
    if rng.random() < 0.4:
        pieces += [rng.choice(joints), rng.choice(middles)]
    return "".join([*pieces, rng.choice(joints), rng.choice(ends)])


# Stories ---------------------------------------------------------------------------------------


class Story:
    """The characters and words of one story, from which any number of texts can be written."""

    def __init__(self, rng: random.Random, plot: str | None = None) -> None:
        """Draw a plot, a hero, a friend, a bystander and the things of the story."""
        self.grammar = load()
        self.rng = rng
        self.plot_name = plot or rng.choice(self.grammar.story_plots)
        self.plot = self.grammar.plots[self.plot_name]
        self.hero = self._draw_character(set(), friend=False)
        self.friend = self._draw_character({self.hero.kind, self.hero.name}, friend=True)
        taken = {self.hero.kind, self.friend.kind}
        animals = [row["kind"] for row in self.grammar.tables["animal"]]
        self.third = rng.choice([kind for kind in animals if kind not in taken])
        self.slots = self._draw_slots()
        self.fixed: dict[str, str] = {}
        self.unmet: set[str] = set()
        self.introductions: list[str] = []

    def _draw_character(self, taken: set[str], *, friend: bool) -> Character:
        rng, tables = self.rng, self.grammar.tables
        if friend and rng.random() < 0.8:
            gender = "he" if self.hero.gender == "she" else "she"
        else:
            gender = rng.choice(("she", "he"))
        people = "girl" if gender == "she" else "boy"
        human = rng.random() < (0.12 if friend else 0.3)
        rows = [row for row in tables[people if human else "animal"] if row["kind"] not in taken]
        row = rng.choice(rows)
        column = "friend_adj" if friend else "adj"
        adjectives = [entry[column] for entry in tables[column]]
        adjective = rng.choice([a for a in adjectives if _fits(a, row["kind"], human=human)])
        name = ""
        if rng.random() < (0.5 if friend else 0.75):
            names = [entry["name"] for entry in tables[gender] if entry["name"] not in taken]
            name = _invented_name(rng) if rng.random() < 0.1 else rng.choice(names)
        return Character(row["kind"], adjective, name, gender, row)

    def _draw_slots(self) -> dict[str, str]:
        """Choose the words of this story; templates in them are expanded on first use."""
        rng, tables = self.rng, self.grammar.tables
        slots: dict[str, str] = {}
        for name in ("where", "food", "plant", "skill", "craft", "fear", "mystery", "trouble"):
            slots |= rng.choice(tables[name])
        while slots["skill"][:4] == self.hero.kind[:4]:  # bakers can bake, and painters paint
            slots |= rng.choice(tables["skill"])
        things = tables["thing"]
        if self.plot_name == "mend":
            breakable = {row["breakable"] for row in tables["breakable"]}
            things = [row for row in things if row["noun"] in breakable]
        slots |= rng.choice(things)
        slots["colour"] = rng.choice(tables["colour"])["colour"]
        for number, row in enumerate(rng.sample(tables["place"], 3), start=1):
            slots[f"at{number}"] = row["at"]
            slots[f"place{number}"] = row["place"]
        hero = self.hero
        slots |= {key: hero.row[key] for key in ("home", "moved", "feature")}
        slots["thing"] = f"{slots['colour']} {slots['noun']}"
        slots["third"] = f"the {self.third}"
        slots["a_third"] = with_article(self.third)
        slots |= _PRONOUNS[hero.gender]
        slots |= {f"f{key}": word for key, word in _PRONOUNS[self.friend.gender].items()}
        slots["kind"], slots["fkind"] = hero.kind, self.friend.kind
        slots["name"] = hero.name or f"the {hero.kind}"
        slots["call"] = hero.call
        slots["self"] = hero.name or with_article(hero.kind)
        slots["fself"] = self.friend.name or with_article(self.friend.kind)
        slots["friend_call"] = self.friend.name or "my friend"
        slots["a_hero_short"] = with_article(hero.kind)
        if hero.name:
            slots["meet"] = f"{hero.name} was {with_article(hero.described)}."
            slots["intro"] = rng.choice(
                (
                    f"{hero.name} was {with_article(hero.described)} who lived",
                    f"{hero.name}, {with_article(hero.described)}, lived",
                    f"{hero.name} the {hero.kind} lived",
                )
            )
            slots["tag"] = f"{hero.name} the {hero.kind}"
        else:
            slots["meet"] = f"There was {with_article(hero.described)}."
            slots["intro"] = f"the {hero.described} lived"
            slots["tag"] = f"the {hero.described}"
        slots["parent"] = rng.choice(("mother", "father"))
        slots["who"] = self._who()
        slots["a_friend_short"] = with_article(self.friend.kind)
        return slots

    def _who(self) -> str:
        """Name the hero as in a request for the story."""
        hero, rng = self.hero, self.rng
        kind = hero.described if rng.random() < 0.4 else hero.kind
        if not hero.name or rng.random() < 0.5:
            return with_article(kind)
        return rng.choice(
            (
                hero.name,
                f"{hero.name} the {hero.kind}",
                f"{with_article(kind)} named {hero.name}",
                f"{with_article(kind)} called {hero.name}",
            )
        )

    def slot(self, key: str) -> str:
        """Expand one slot; its first letter and article follow the spelling of the key."""
        if key[0].isupper():
            return capitalise(self.slot(key[0].lower() + key[1:]))
        match key:
            case "hero" | "friend" if key in self.unmet:
                self.introductions.append(self.slot(f"a_{key}"))
                return self.introductions[-1]
            case "hero":
                return self.hero.mention(self.rng)
            case "friend":
                return self.friend.mention(self.rng)
            case "a_hero":
                self.unmet.discard("hero")
                return self.hero.introduce(self.rng)
            case "a_friend":
                self.unmet.discard("friend")
                return self.friend.introduce(self.rng)
        if key not in self.fixed and key in self.slots:
            self.fixed[key] = self.expand(self.slots[key])
        if key in self.fixed:
            return self.fixed[key]
        if key.startswith("a_"):
            return with_article(self.slot(key[2:]))
        raise KeyError(key)

    def expand(self, text: str) -> str:
        """Expand one template."""
        return "".join(self._pieces(parse(text)))

    def rule(self, name: str) -> str:
        """Expand one line of a shared phrase."""
        return self.expand(self.rng.choice(self.grammar.rules[name]))

    def _pieces(self, sequence: Sequence) -> Iterator[str]:
        for part in sequence:
            match part:
                case str():
                    yield part
                case Slot(key):
                    yield self.slot(key)
                case Call(rule):
                    yield self.rule(rule)
                case Choice(options):
                    yield from self._pieces(self.rng.choice(options))

    def tell(self, *, title: bool = False, plot: str | None = None, skip: int = 0) -> str:
        """Write the story, with or without paragraphs, without its first `skip` steps."""
        rng = self.rng
        chosen = self.grammar.plots[plot] if plot else self.plot
        gap = "\n\n" if rng.random() < 0.7 else " "
        text = ""
        pending = ""
        for step in chosen.steps[skip:]:
            if step.paragraph:
                pending = gap
            if step.optional and rng.random() < 0.55:
                continue
            text += (pending or " ") * bool(text) + self.expand(rng.choice(step.variants))
            pending = ""
        if rng.random() < 0.1 and plot is None and not text.endswith("The end."):
            text += f"{gap}The end."
        if title:
            text = f"{title_case(self.expand(rng.choice(self.plot.titles)))}\n\n{text}"
        return text

    def tell_at_once(self) -> str | None:
        """Write the story from its first event, introducing characters there; None if awkward."""
        self.unmet, self.introductions = {"hero", "friend"}, []
        text = self.tell(skip=next(i for i, step in enumerate(self.plot.steps) if step.paragraph))
        self.unmet = set()
        lower = text.lower()
        positions = [lower.find(introduction.lower()) for introduction in self.introductions]
        pronoun = re.search(r"\b(he|she|his|her|him)\b", lower)
        if not positions or min(positions) > (pronoun.start() if pronoun else len(text)):
            return None
        awkward = any(f"{introduction}'s".lower() in lower for introduction in self.introductions)
        return None if awkward else text

    def topic(self) -> str:
        """Write a topic with which this story could be requested."""
        if self.rng.random() < 0.3:
            return self.slot("who")
        return self.expand(self.rng.choice(self.plot.asks))

    def short(self) -> str:
        """Summarise the story in two or three sentences."""
        return self.expand(self.rng.choice(self.plot.shorts))

    def question(self) -> tuple[str, str]:
        """Write a question about the story, and its answer."""
        question, answer = self.rng.choice(self.plot.questions)
        return self.expand(question), self.expand(answer)


# Documents -------------------------------------------------------------------------------------


def plain_document(rng: random.Random) -> str:
    """Write a story; some start in the middle, so that the model can continue any sentence."""
    story = Story(rng)
    if rng.random() < 0.12 and (opened := story.tell_at_once()):
        return opened
    text = story.tell(title=rng.random() < 0.07)
    if rng.random() < 0.2:
        starts = [match.end() for match in re.finditer(r"[.!?]\"?\s+", text[: len(text) * 2 // 3])]
        if starts:
            text = text[rng.choice(starts) :]
    return text


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _loosely_typed(rng: random.Random, text: str) -> str:
    """Sometimes drop the capital or the full stop, as users do."""
    if rng.random() < 0.15:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.15:
        text = text.rstrip(".!")
    return text


def _story_turn(rng: random.Random, story: Story, *, follow_up: bool = False) -> list[Message]:
    """Write a request for a story, and the story."""
    topic = story.topic()
    story.slots["topic"] = story.fixed["topic"] = topic
    if follow_up:
        rule = "another_topic" if rng.random() < 0.5 else "another"
        return [_user(story.rule(rule)), _assistant(story.tell())]
    if rng.random() < 0.12:
        return [_user(story.rule("request_any")), _assistant(story.tell())]
    if rng.random() < 0.1:
        return [_user(story.rule("request_short")), _assistant(story.short())]
    request = _loosely_typed(rng, story.rule("request"))
    lead = f"{story.rule('lead')}\n\n" if rng.random() < 0.1 else ""
    return [_user(request), _assistant(lead + story.tell(title=rng.random() < 0.05))]


def _follow_up(rng: random.Random, story: Story) -> list[Message]:
    """Write a follow-up to a story, and the reply."""
    match rng.choice(("next", "next", "happier", "shorter", "question", "thank", "another")):
        case "next":
            return [_user(story.rule("next")), _assistant(story.tell(plot="more"))]
        case "happier":
            ending = f"{story.short()} {story.tell(plot='happy')}"
            lead = f"{story.rule('happier_lead')}\n\n" if rng.random() < 0.4 else ""
            return [_user(story.rule("happier")), _assistant(lead + ending)]
        case "shorter":
            return [_user(story.rule("shorter")), _assistant(story.short())]
        case "question":
            question, answer = story.question()
            return [_user(question), _assistant(answer)]
        case "thank":
            return [_user(story.rule("thank")), _assistant(story.rule("thank_reply"))]
        case _:
            return _story_turn(rng, Story(rng), follow_up=True)


def _small_talk(rng: random.Random, story: Story) -> list[Message]:
    """Write a greeting or a question other than a request, sometimes followed by a story."""
    story.slots["topic"] = story.topic()
    names = ("hello", "hello", "who", "who", "can", "how", "thank", "bye", "unknown", "unknown")
    name = rng.choice(names)
    reply = story.rule(f"{name}_reply")
    messages = [_user(_loosely_typed(rng, story.rule(name))), _assistant(reply)]
    if name in {"hello", "who", "can", "how"} and rng.random() < 0.5:
        messages += _story_turn(rng, Story(rng))
    elif reply.endswith("?") and "about" in reply and name == "unknown" and rng.random() < 0.5:
        messages += [_user(story.rule("yes")), _assistant(story.tell())]
    return messages


def chat_document(rng: random.Random) -> list[Message]:
    """Write a conversation of one to three exchanges."""
    story = Story(rng)
    messages: list[Message] = []
    if rng.random() < 0.15:
        messages.append({"role": "system", "content": story.rule("system")})
    if rng.random() < 0.15:
        return messages + _small_talk(rng, story)
    messages += _story_turn(rng, story)
    if rng.random() < 0.3:
        messages += _follow_up(rng, story)
        if rng.random() < 0.2:
            messages += [_user(story.rule("thank")), _assistant(story.rule("thank_reply"))]
    return messages
