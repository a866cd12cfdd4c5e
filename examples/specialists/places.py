"""Places that do not exist, to learn a job on that must work for places that do.

The names of the held-out half are built from other stems than those of the training half, so no
held-out name, question or comparison is ever trained on. Real places, the demo's among them, are
in neither.
"""

from dataclasses import dataclass
from random import Random
from typing import Literal

from examples.react.tools import FACTS

Half = Literal["train", "held-out"]


@dataclass(frozen=True)
class Place:
    """Something that has a height."""

    name: str
    """As the tools call it: "Karvel Tower"."""
    article: bool
    """Whether people say "the Karvel Tower"."""
    height_m: int
    about: str
    """What the lookup says behind the height; may be empty."""

    @property
    def spoken(self) -> str:
        """The name within a sentence."""
        return f"the {self.name}" if self.article else self.name


@dataclass(frozen=True)
class _Kind:
    pattern: str
    article: bool
    lowest: int
    highest: int


_KINDS = (
    _Kind("Mount {}", False, 700, 8900),
    _Kind("Mont {}", False, 700, 4900),
    _Kind("{}", False, 300, 6900),
    _Kind("{} Peak", False, 700, 7900),
    _Kind("{} Tower", True, 60, 890),
    _Kind("{} {}", False, 60, 890),
    _Kind("{} Bridge", True, 40, 360),
    _Kind("{} {} Bridge", True, 40, 360),
    _Kind("{} Cathedral", False, 50, 180),
    _Kind("{} Pyramid", True, 30, 150),
    _Kind("Statue of {}", True, 20, 190),
    _Kind("Big {}", False, 20, 190),
    _Kind("{} Dam", True, 40, 310),
    _Kind("{} Lighthouse", True, 20, 140),
)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_HEADS: dict[Half, tuple[str, ...]] = {
    "train": _words(
        "Bar Cal Dor Fen Gal Hol Kar Lum Mar Nor Pel Quen Ros Sil Tam Ul Ver Wen Yar Zel "
        "Bran Clo Dra Fir Glen Hes Jor Kil Lor Mon Ner Or Pra Rin Sto Tel Um Vil Wol Zan"
    ),
    "held-out": _words("Alb Bex Cor Dun Esk Fal Gor Hal Ish Kov Lan Mel Nim Os Pir Rav Sev"),
}
_TAILS: dict[Half, tuple[str, ...]] = {
    "train": _words(
        "ba den dor fell gard holm ia kan lin mar nes ora pa ric sa tara ton vel wick zim "
        "bury chester e fa go hurst is ka la mond na os port ra stan tis um via wald yo"
    ),
    "held-out": _words("ag berg ca dale en ford gi ham ivo jan ko lau min nor ov rona sk tal"),
}
_NOUNS: dict[Half, tuple[str, ...]] = {
    "train": _words(
        "Silver Stone Harbour River Old North Green Crystal Iron Queen King Eagle Lion Winter "
        "Summer Unity Courage Justice Hope Victory Sun Moon Garden Market Castle White Red"
    ),
    "held-out": _words("Amber Copper Dragon Falcon Granite Mercy Peace South Valley Wisdom"),
}

_WHERE = (
    "It stands near the old town of a quiet province.",
    "It lies on the border of two countries.",
    "It stands at the mouth of a wide river.",
    "It rises above a plain of farms and small lakes.",
    "It stands in the middle of a busy capital.",
    "It lies far from any road.",
    "It looks down on a harbour full of fishing boats.",
    "It stands on an island that can be reached by ferry.",
)
_MORE = (
    "It was planned by an engineer who did not live to see it finished.",
    "Many visitors come in spring, when the weather is mild and the days are long.",
    "Its colour changes with the light, from grey in the morning to red in the evening.",
    "For many years nobody believed that it could be climbed from the north.",
    "A small museum at its foot tells how the work was done.",
    "The people who live nearby have a song about it, which children learn at school.",
    "Birds nest in its upper parts, and nobody is allowed to disturb them.",
    "It had to be repaired after a great storm, which took several years.",
    "On clear days it can be seen from the other side of the bay.",
    "It was once the tallest of its kind, but that was long ago.",
    "A narrow stair leads to the top, and a lift was added later.",
    "Clouds hide it for most of the winter.",
    "Its picture is on the coins and stamps of the country.",
    "Old maps give it another name, which hardly anybody uses now.",
    "The rock below it is full of caves that have never been explored to the end.",
    "Every summer there is a race from the village to the top and back.",
)


def place(random: Random, half: Half, *, sentences: int) -> Place:
    """A new place whose description has `sentences` sentences."""
    kind = random.choice(_KINDS)
    stems = [_stem(random, half) for _ in range(kind.pattern.count("{}"))]
    name = kind.pattern.format(*stems)
    if name in FACTS or len({*stems}) < len(stems):
        return place(random, half, sentences=sentences)
    about = [random.choice(_WHERE), *random.sample(_MORE, max(0, sentences - 1))][:sentences]
    # Even on a logarithmic scale: low places are as frequent as high ones.
    height = kind.lowest * (kind.highest / kind.lowest) ** random.random()
    return Place(name, kind.article, round(height), " ".join(about))


def pair(random: Random, half: Half, *, sentences: int) -> tuple[Place, Place]:
    """Two places, the higher one first and clearly higher."""
    while True:
        one, other = (place(random, half, sentences=sentences) for _ in range(2))
        high, low = sorted((one, other), key=lambda item: -item.height_m)
        # No name within the other: a graph of places would confuse the two as well.
        apart = high.name not in low.name and low.name not in high.name
        if apart and high.height_m >= 1.2 * low.height_m:
            return high, low


def _stem(random: Random, half: Half) -> str:
    if random.random() < 0.3:
        return random.choice(_NOUNS[half])
    return random.choice(_HEADS[half]) + random.choice(_TAILS[half])
