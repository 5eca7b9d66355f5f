"""Words and sentences of our own: keys and values of needles, and texts of any length."""

from collections.abc import Iterator
from random import Random
from uuid import UUID


def as_words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = as_words("""
able amber ancient angry autumn basic bitter black blue bold brave brief bright broad brown calm
careful cheap clean clear clever cloudy cold common cool copper cosy crisp curious daily damp
dark dear deep distant dry dusty eager early easy eastern empty equal exact fair faint famous
fancy fast fierce final firm flat fond formal free fresh frosty full funny gentle giant glad
golden good grand grave great green grey happy hard harsh heavy hidden high hollow honest humble
icy idle inner jolly keen kind large late lazy lean level light little lively local lone long
loud loyal lucky major mild minor misty modest narrow neat new nimble noble northern odd old
open orange outer pale patient plain polite poor proud public pure purple quick quiet rapid rare
ready red rich ripe rough round royal rural rusty sad safe scarce serious sharp short shy silent
silver simple slim slow small smart smooth soft solid sour southern spare steady steep stiff
still strange strict strong subtle sudden sunny sweet swift tall tame tart tender thick thin
tidy timid tiny tired tough true urban usual vague vast velvet vivid warm weak western wet white
whole wide wild windy wise wooden worthy yellow young
""")
NOUNS = as_words("""
acorn actor airport anchor apple apron arch arrow artist atlas baker balcony ball bamboo banjo
barrel basket beach bean bell bench berry bicycle bird blanket boat book boot bottle bowl box
branch bread breeze brick bridge broom bucket butter button cabin cake camel camera canal candle
canoe canvas carpet carrot cart castle cat cave cellar chair chalk cherry chess chimney church
circle city clay clerk cliff clock cloud clover coach coast coat coffee comet compass cook coral
corner cottage cotton cousin crane cricket crown cup curtain dancer desert desk diamond doctor
dolphin donkey door dragon drawer dream drum duck eagle editor elbow engine farm farmer feather
fence fern ferry field fig finger fire fish flag flame flock flour flower flute fog forest fork
fox frame garden gate ginger glass glove goat goose grain grape grass guitar hammer harbor harp
harvest hat hawk hedge heron hill honey horn horse hotel house insect island ivory jacket jar
jewel judge jungle kettle key king kite kitchen knight ladder lake lamp lantern leaf lemon
lesson letter library lily lion lizard lock machine magnet map marble market meadow medal melon
metal mill mirror monkey moon moss motor mountain museum needle nest novel nurse oak oar ocean
olive onion orchard otter oven owl paint palace panda paper parade parrot pearl pebble pencil
pepper piano picture pilot pine planet plate plum pocket poet pond porch potato prince puppet
quilt rabbit radio rain raven ribbon rice ring river road robin rocket roof rope rose saddle
sailor salmon sand scarf school shadow sheep shell ship shoe shop shore shovel silk singer
sister skirt sky snow sofa soldier song soup spider spoon spring squirrel stable stone storm
stove street student sugar summer sun swan table tailor teacher temple tent theatre thread
throne ticket tiger timber toast tower train tree trumpet tulip tunnel turtle uncle valley vase
village violin wagon wall walnut water wheat wheel willow window winter wolf wool writer yard
zebra
""")
VERBS = as_words("""
admires avoids borrows carries copies describes draws follows forgets guards helps ignores keeps
leaves loses mends misses moves needs notices paints praises repairs returns sells shares
sketches studies trusts visits watches
""")
PLACES = (
    "behind the wall",
    "beyond the river",
    "near the old mill",
    "below the tower",
    "on the road to town",
    "in the upper room",
    "at the edge of the forest",
    "beside the harbor",
    "under the bridge",
    "across the square",
    "in a corner of the garden",
    "on the first floor",
    "close to the station",
    "at the foot of the hill",
)

TIMES = (
    "in the morning",
    "before dinner",
    "late at night",
    "on most days",
    "in the winter",
    "after the rain",
    "once a week",
    "every other summer",
    "without a word",
    "for no clear reason",
    "as the bells ring",
    "when nobody asks",
    "now and then",
)

FRAMES = (
    "The {a} {n} {v} the {m} {p}.",
    "{T}, the {n} {v} a {b} {m}.",
    "Nobody knows why the {n} {v} the {b} {m}, but it happens {t}.",
    "A {a} {n} and a {b} {m} stand {p}.",
    "People say that the {n} {v} every {m} {p}.",
    "It is a {a} thing to own a {n}, and a {b} thing to lose a {m}.",
    "The {m} {p} belongs to a {a} {n}.",
    "If the {n} is {a}, the {m} is {b}, and the other way round.",
    "What the {n} {v} {t} is of little use to the {m}.",
    "There was a {n} {p}, {a} and {b}, which the {m} {v}.",
)
NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)


def compound(random: Random) -> str:
    """Returns an adjective and a noun: ``gentle-lantern``."""
    return f"{random.choice(ADJECTIVES)}-{random.choice(NOUNS)}"


def number(random: Random) -> str:
    """Returns seven digits."""
    return str(random.randint(1_000_000, 9_999_999))


def uuid(random: Random) -> str:
    """Returns a UUID of version 4."""
    return str(UUID(int=random.getrandbits(128), version=4))


KINDS = {"words": compound, "numbers": number, "uuids": uuid}  # of keys and values


def distinct(random: Random, kind: str, n: int) -> list[str]:
    """Returns n different keys or values of a kind."""
    found: dict[str, None] = {}
    while len(found) < n:
        found[KINDS[kind](random)] = None
    return list(found)


def prose(random: Random) -> Iterator[str]:
    """Yields random sentences without end. They replace RULER's essays."""
    while True:
        time = random.choice(TIMES)
        yield random.choice(FRAMES).format(
            a=random.choice(ADJECTIVES), b=random.choice(ADJECTIVES), n=random.choice(NOUNS),
            m=random.choice(NOUNS), v=random.choice(VERBS), p=random.choice(PLACES), t=time,
            T=time.capitalize(),
        )  # fmt: skip


def noise() -> Iterator[str]:
    """Yields five sentences over and over."""
    while True:
        yield from NOISE


def listed_words(random: Random) -> Iterator[str]:
    """Yields different words without end: first single words in random order, then compounds."""
    single = sorted({*ADJECTIVES, *NOUNS})
    random.shuffle(single)
    yield from single
    seen = set(single)
    while True:
        word = compound(random)
        if word not in seen:
            seen.add(word)
            yield word
