"""The project's own tasks, made by seeded rules, and those of a user's file; both scored by rule, none by another model.

Five kinds, the same share of each: instruction format, short facts, arithmetic, retrieval from a long context, long answers.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from pdq_tui.errors import UsageError

KINDS: Final = ("format", "fact", "arithmetic", "retrieval", "long")


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """rule  one of ``RULES``; ``answer`` is what it compares with. ``most``: new tokens at most."""

    id: str
    kind: str
    prompt: str
    rule: str
    answer: str
    most: int = 24


# -- rules -------------------------------------------------------------------------------------------------------------

_NUMBER: Final = re.compile(r"-?\d+(?:,\d{3})+|-?\d+")
_ITEM: Final = re.compile(r"^[\s\-*•]*(?:\d+[.)]\s*)?")


def _plain(text: str) -> str:
    return re.sub(r"[^\w]+", " ", text.casefold()).strip()


def _holds(text: str, answer: str) -> bool:
    """Any of the answers that ``|`` parts, as whole words."""
    return any(f" {_plain(a)} " in f" {_plain(text)} " for a in answer.split("|"))


def _number(text: str, answer: str) -> bool:
    """The last whole number."""
    numbers = _NUMBER.findall(text)
    return bool(numbers) and int(numbers[-1].replace(",", "")) == int(answer)


def _lines(text: str, answer: str) -> bool:
    """These lines in this order and no others, whatever bullets or numbers stand before them."""
    lines = [_plain(_ITEM.sub("", line, count=1)) or _plain(line) for line in text.strip().splitlines()]
    bare = [_plain(line) for line in text.strip().splitlines()]
    wanted = [_plain(line) for line in answer.split("|")]
    return wanted in ([line for line in lines if line], [line for line in bare if line])


def _items(text: str, answer: str) -> bool:
    """As many different items, parted by commas, in one line."""
    items = [_plain(item) for item in text.strip().rstrip(".").split(",")]
    return "\n" not in text.strip() and len(items) == len(set(items)) == int(answer) and all(items)


def _one_word(text: str, answer: str) -> bool:
    return len(_plain(text).split()) == 1 and _holds(text, answer)


def _upper(text: str, answer: str) -> bool:
    return text.upper() == text and _holds(text, answer)


def _json_keys(text: str, answer: str) -> bool:
    """One JSON object with these keys and no others; a fence around it is no fault."""
    bare = re.sub(r"^```\w*\n?|```$", "", text.strip()).strip()
    try:
        body = json.loads(bare)
    except (ValueError, RecursionError):
        return False
    return isinstance(body, dict) and sorted(body) == sorted(answer.split("|"))


def _sentences(text: str, answer: str) -> bool:
    """At least as many sentences as ``n:word`` says, none twice, and the word in them."""
    least, word = answer.split(":", 1)
    found = [_plain(s) for s in re.split(r"[.!?]+(?:\s|$)", text) if len(_plain(s).split()) > 2]
    return len(found) >= int(least) and len(set(found)) == len(found) and _holds(text, word)


RULES: Final[dict[str, Callable[[str, str], bool]]] = {
    "contains": _holds,
    "number": _number,
    "lines": _lines,
    "items": _items,
    "one-word": _one_word,
    "upper": _upper,
    "json-keys": _json_keys,
    "sentences": _sentences,
}


def right(task: Task, text: str) -> bool:
    return RULES[task.rule](text, task.answer)


# -- the project's own -------------------------------------------------------------------------------------------------

_CAPITALS: Final = (
    "France:Paris Italy:Rome Spain:Madrid Germany:Berlin Japan:Tokyo China:Beijing Russia:Moscow Egypt:Cairo Greece:Athens "
    "Austria:Vienna Portugal:Lisbon Norway:Oslo Sweden:Stockholm Finland:Helsinki Denmark:Copenhagen Poland:Warsaw "
    "Hungary:Budapest Ireland:Dublin Belgium:Brussels Turkey:Ankara Iran:Tehran Iraq:Baghdad India:Delhi Thailand:Bangkok "
    "Vietnam:Hanoi Cuba:Havana Peru:Lima Chile:Santiago Canada:Ottawa Australia:Canberra Kenya:Nairobi Ukraine:Kyiv|Kiev"
)
_SYMBOLS: Final = "oxygen:O hydrogen:H carbon:C nitrogen:N iron:Fe gold:Au silver:Ag sodium:Na helium:He calcium:Ca zinc:Zn tin:Sn"
_OPPOSITES: Final = (
    "hot:cold up:down left:right open:closed|close|shut day:night wet:dry big:small|little fast:slow young:old early:late "
    "full:empty hard:soft|easy light:dark|heavy rich:poor strong:weak true:false begin:end|finish buy:sell win:lose"
)
_ORDER: Final = (
    ("month", "January February March April May June July August September October November December"),
    ("day of the week", "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
)
_COLOURS: Final = [
    "red",
    "blue",
    "green",
    "yellow",
    "white",
    "black",
    "brown",
    "grey",
    "orange",
    "purple",
    "pink",
    "silver",
]
_THINGS: Final = [
    "box",
    "door",
    "lamp",
    "chair",
    "bottle",
    "bag",
    "key",
    "boat",
    "drum",
    "clock",
    "coat",
    "cup",
]
_TOPICS: Final = [
    "rain",
    "bread",
    "music",
    "trees",
    "winter",
    "books",
    "fish",
    "stars",
    "tea",
    "trains",
    "bees",
    "salt",
]
_GROUPS: Final = [
    "fruits",
    "animals",
    "colours",
    "countries",
    "vegetables",
    "tools",
    "cities",
    "rivers",
    "sports",
    "metals",
]
_KEYS: Final = ["name", "age", "city", "price", "colour", "size", "title", "year"]


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(a, b) for a, _, b in (pair.partition(":") for pair in text.split())]


def _fact(rng: random.Random) -> tuple[str, str, str, int]:
    which = rng.randrange(4)
    if which == 0:
        country, capital = rng.choice(_pairs(_CAPITALS))
        return f"What is the capital of {country}? Answer in one short sentence.", "contains", capital, 24
    if which == 1:
        element, symbol = rng.choice(_pairs(_SYMBOLS))
        return (
            f"What is the chemical symbol of {element}? Answer in one short sentence.",
            "contains",
            symbol,
            24,
        )
    if which == 2:
        word, other = rng.choice(_pairs(_OPPOSITES))
        return f'What is the opposite of "{word}"? Answer in one short sentence.', "contains", other, 24
    name, text = rng.choice(_ORDER)
    words = text.split()
    at = rng.randrange(len(words))
    after = words[(at + 1) % len(words)]
    return f"Which {name} comes right after {words[at]}? Answer with its name.", "contains", after, 24


def _arithmetic(rng: random.Random) -> tuple[str, str, str, int]:
    which = rng.randrange(4)
    a, b = rng.randint(2, 49), rng.randint(2, 49)
    if which == 0:
        return f"What is {a} + {b}? Answer with the number only.", "number", str(a + b), 16
    if which == 1:
        high, low = max(a, b), min(a, b)
        return f"What is {high} - {low}? Answer with the number only.", "number", str(high - low), 16
    if which == 2:
        a, b = rng.randint(2, 12), rng.randint(2, 12)
        return f"What is {a} times {b}? Answer with the number only.", "number", str(a * b), 16
    thing = rng.choice(_THINGS)
    return (
        f"Tom has {a} {thing}s and buys {b} more. How many {thing}s has he now? Answer with the number only.",
        "number",
        str(a + b),
        24,
    )


def _format(rng: random.Random) -> tuple[str, str, str, int]:
    which = rng.randrange(5)
    if which == 0:
        count, group = rng.randint(2, 5), rng.choice(_GROUPS)
        return (
            f"Name exactly {count} {group} in one line, separated by commas, and write nothing else.",
            "items",
            str(count),
            32,
        )
    if which == 1:
        word, other = rng.choice(_pairs(_OPPOSITES))
        return f'Answer with exactly one word: what is the opposite of "{word}"?', "one-word", other, 12
    if which == 2:
        word = rng.choice(_TOPICS)
        return f'Write the word "{word}" in capital letters and nothing else.', "upper", word, 12
    if which == 3:
        keys = rng.sample(_KEYS, 2)
        return (
            f'Write one JSON object with exactly the keys "{keys[0]}" and "{keys[1]}" and nothing else.',
            "json-keys",
            "|".join(keys),
            48,
        )
    words = rng.sample(_TOPICS, 3)
    return (
        f"Repeat these words, one on each line, and write nothing else: {', '.join(words)}",
        "lines",
        "|".join(words),
        24,
    )


def _retrieval(rng: random.Random) -> tuple[str, str, str, int]:
    lines = rng.choice((12, 24, 40))
    places = rng.sample([(c, t) for c in _COLOURS for t in _THINGS], lines)
    codes = rng.sample(range(1000, 10000), lines)
    notes = "\n".join(f"The number of the {c} {t} is {n}." for (c, t), n in zip(places, codes, strict=True))
    at = rng.randrange(lines)
    colour, thing = places[at]
    return (
        f"{notes}\n\nWhat is the number of the {colour} {thing}? Answer with the number only.",
        "contains",
        str(codes[at]),
        16,
    )


def _long(rng: random.Random) -> tuple[str, str, str, int]:
    which = rng.randrange(3)
    if which == 0:
        first, count = rng.randint(1, 30), rng.randint(10, 15)
        wanted = [str(n) for n in range(first, first + count)]
        return (
            f"Count from {first} to {first + count - 1}. Write one number on each line and nothing else.",
            "lines",
            "|".join(wanted),
            96,
        )
    if which == 1:
        words = rng.sample([f"{c} {t}" for c in _COLOURS for t in _THINGS], 10)
        listed = "\n".join(words)
        return (
            f"Copy this list, one entry on each line, and write nothing else:\n{listed}",
            "lines",
            "|".join(words),
            96,
        )
    topic = rng.choice(_TOPICS)
    return f"Write four different sentences about {topic}.", "sentences", f"4:{topic}", 96


_MAKERS: Final = dict(zip(KINDS, (_format, _fact, _arithmetic, _retrieval, _long), strict=True))


def own(count: int, seed: int) -> list[Task]:
    """``count`` different tasks, the kinds in turn. The first of more tasks are those of fewer, by one ``seed``. Raises
    UsageError where the rules do not give as many."""
    rng = random.Random(f"tasks:{seed}")
    made: list[Task] = []
    seen: set[str] = set()
    tries = 0
    while len(made) < count:
        kind = KINDS[len(made) % len(KINDS)]
        prompt, rule, answer, most = _MAKERS[kind](rng)
        tries += 1
        if tries > 100 * count:
            raise UsageError(f"the rules do not make {count} different tasks")
        if prompt in seen:
            continue
        seen.add(prompt)
        made.append(
            Task(id=f"{kind}-{len(made) + 1}", kind=kind, prompt=prompt, rule=rule, answer=answer, most=most)
        )
    return made


# -- a user's own ------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[Task]:
    """One task a line: {"prompt", "answer"[, "rule", "kind", "id", "max_tokens"]}; the rule is "contains" where none is
    named. Raises UsageError with the line that is not right."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--tasks: {path} cannot be read ({error})") from error
    found: list[Task] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            found.append(_task(line, number, path))
    if not found:
        raise UsageError(f"{path} holds no task")
    twice = {t.id for t in found if sum(o.id == t.id for o in found) > 1} if len(found) < 2000 else set()
    if twice:
        raise UsageError(f"{path}: the id {min(twice)!r} stands twice")
    return found


def _task(line: str, number: int, path: Path) -> Task:
    def wrong(what: str) -> UsageError:
        return UsageError(f"{path}, line {number}: {what}", f"rules: {', '.join(RULES)}")

    try:
        body: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise wrong(f"no JSON ({error})") from error
    if not isinstance(body, dict):
        raise wrong("a task is an object")
    prompt, answer, rule = body.get("prompt"), body.get("answer"), body.get("rule", "contains")
    if not isinstance(prompt, str) or not prompt.strip():
        raise wrong('no "prompt"')
    if isinstance(answer, bool) or not isinstance(answer, str | int) or answer == "":
        raise wrong('"answer" is a text or a whole number')
    if rule not in RULES:
        raise wrong(f'there is no "rule" {rule!r}')
    most = body.get("max_tokens", 64)
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise wrong('"max_tokens" is a whole number above 0')
    task = Task(
        id=str(body.get("id", number)),
        kind=str(body.get("kind", "own")),
        prompt=prompt,
        rule=str(rule),
        answer=str(answer),
        most=most,
    )
    try:
        right(task, "1")
    except ValueError as error:
        raise wrong(f'"answer" {answer!r} does not suit the rule {rule}') from error
    return task
