#!/usr/bin/env python3
"""Endless short stories whose closing questions only their own distant past can answer.

A story tells who put which coloured thing where ("Tom hid the red key in the attic."), goes on about
other matters for some hundreds of words, and ends in questions ("Where is the red key? The red key is in
the attic."). Objects of one story share colours and nouns (red key, red ball, blue key), so both words
matter; each pair occurs once as a fact and once as a question; the places are drawn from 16, so a guess
is right one time in about sixteen.

Choices are skewed on purpose: one favourite, which follows from what was chosen last, is a few times as
likely as any other. A model trained on the text then has a clear greedy choice at most words, and walks
through colours, places and scenes in turn instead of looping.

    stories_text.py --split heldout --stories 3                      # text
    stories_text.py --split heldout --stories 40 --tokens 1260 --json --tokenizer builtin > heldout.jsonl

A story depends on its split, its index, its size and whether it is plain. Splits never share a seed.
"""
import argparse
import json
import random
import re
import sys
from dataclasses import dataclass, field

COLOURS = "red blue green yellow white black golden silver brown purple".split()
THINGS = "key ball lamp book hat kite drum bell cup box coin rope flute doll basket scarf".split()
PLACES = ("attic garden cellar barn kitchen forest tower cave mill library shed castle bakery meadow "
          "harbour well").split()
GIRLS = "Mia Anna Nora Ella Lucy Rosa Clara Ida".split()
BOYS = "Tom Ben Leo Sam Max Finn Jack Hugo".split()
NAMES = [name for pair in zip(BOYS, GIRLS) for name in pair]
VERBS = "put hid left placed".split()

# In all templates: [a|b|c] is a choice, the first the likeliest; {x} {y} {z} are people, {He} {his} {him} {he}
# belong to x, {here} is a place.
OPENINGS = [
    "Once upon a time there was a [small|quiet|busy|happy] village [by the sea|in the hills|near a river|at the edge of a wood]. "
    "{x}, {y} and {z} lived there, and they were the best of friends.",
    "Once upon a time {x} and {y} lived in a [little|warm|crooked|tall] house [by the sea|in the hills|near a river|at the edge of a wood]. "
    "Their friend {z} came to visit them every day.",
    "Long ago, when [winters|summers|nights|days] were longer, {x} lived in a [small|quiet|busy|happy] town. "
    "{y} and {z} lived just around the corner.",
]
TAILS = ["", ", and nobody saw it", ", where it was safe", ", and then went home", ", and told no one",
         ", next to an old chair", ", as every year"]
AFTER_FACT = [
    "{He} closed the door [softly|slowly|with care].",
    "It was a good place for it.",
    "A [mouse|cat|bird|spider] was the only one who [saw it|watched|knew].",
    "{He} counted to ten and [walked|ran|danced] away.",
    "\"I will remember that,\" said {x}.",
    "Nobody asked {him} why.",
    "Then {he} had to [laugh|sneeze|hurry|rest].",
    "The [wind|sun|rain|snow] was [strong|warm|soft|cold] that day.",
]
TIMES = ["In the morning,", "At noon,", "In the afternoon,", "In the evening,", "The next day,", "After breakfast,",
         "A little later,", "When the sun went down,", "One day later,"]
SCENES = [
    "it began to [rain|snow|hail], and everyone ran under the big tree. {x} told a story about a [whale|giant|dragon] who was "
    "afraid of the dark. By the time it ended, the sky was clear again.",
    "{x} met an old man with a [long|grey|curly] beard on the road. He had lost his [goat|way|glasses], so {x} helped him to look. "
    "They found it behind a wall, and the old man thanked {him} with an apple.",
    "{x} and {y} baked bread together. The first loaf was [burnt|flat|too salty], and the second was [perfect|better|round]. They "
    "ate it warm, with butter and honey, and kept a slice for {z}.",
    "a [fox|deer|hare] came out of the trees and looked at {x}. {He} stood very still and did not even breathe. Then the "
    "animal turned around and was gone.",
    "{y} had a [bad|strange|funny] dream and told it to {x}. In the dream all the fish could [sing|fly|talk], and the moon was made "
    "of cheese. They laughed about it until their stomachs hurt.",
    "a ship with [three|two|seven] sails came in from the sea. The sailors brought tea, pepper and news from far away. {x} asked them "
    "a hundred questions, and they answered every one.",
    "{x} climbed the hill to see the [stars|clouds|mountains]. From the top the houses looked as small as [seeds|stones|beans]. {He} "
    "stayed there until {his} feet were cold.",
    "{y} and {z} played a long game of chess. {y} won the first game, {z} won the second, and nobody [won|counted|finished] the "
    "third. {x} watched them and ate all the [nuts|plums|cookies].",
    "the river was [high|frozen|low], and the bridge was closed. {x} had to take the long way through the fields. It took two "
    "hours, but {he} sang the whole time.",
    "the teacher asked everyone to [draw|name|describe] an animal. {x} chose a snail with wings, which made the others "
    "[smile|laugh|wonder]. \"Why not?\" said the teacher and hung it on the wall.",
    "{x} helped {y} to mend the [fence|roof|gate]. They had only one hammer and very few nails. In the end it was a bit "
    "[crooked|loose|strange], but it stood.",
    "a [baker|farmer|tailor] from the next town came to visit. He talked about the price of [flour|wool|hay] and fell asleep in the "
    "middle of a word. {x} put a blanket over him.",
    "{z} was ill and stayed in bed. {x} brought a bowl of soup, and {y} brought [flowers|a pillow|good news]. By evening {z} "
    "was strong enough to complain about the soup.",
    "music came from the [market|square|church]. Two women played, and an old dog howled along. {x} and {y} danced until the "
    "[lights|candles|torches] went out.",
    "{x} found a [feather|shell|leaf] on the path and wondered where it came from. \"From very far away,\" said {y}, who always knew "
    "everything. {x} kept it in {his} pocket for luck.",
    "the [hens|geese|sheep] had escaped again. {x} ran after them to the left, and {y} ran after them to the right. It was {z} who "
    "brought them home, with a handful of corn.",
    "everyone picked [apples|cherries|pears] until their arms were tired. {x} ate more than {he} picked. There was [cake|jam|juice] "
    "for the whole street that week.",
    "a letter came for {x}. It was from {his} [uncle|aunt|cousin], who lived on an island and wrote about [storms|turtles|volcanoes]. {x} "
    "read it twice and answered at once.",
    "{x} learned to [swim|whistle|skate]. At first {he} could not do it at all. But {y} was a [patient|loud|clever] teacher, and after an "
    "hour it went quite well.",
    "thick fog lay over the land. {x} and {y} walked hand in hand so as not to get lost. They heard [bells|voices|an owl] and followed "
    "the sound all the way home.",
    "{y} told a riddle that nobody could solve. {x} thought about it at lunch, and {x} thought about it in bed. \"A [shadow|candle|mirror]!\" "
    "{he} shouted in the middle of the night.",
    "a travelling [painter|clown|doctor] slept at the inn. She owned a parrot that knew [five|nine|six] languages. {x} taught it a sixth "
    "one, or at least the rude words.",
    "{x} walked to the {here} and back, only to think. {He} thought about [time|summer|friends], and about what to eat. When {he} came "
    "home, the table was already set.",
    "{z} planted [beans|carrots|roses] behind the house. \"They will be taller than me,\" said {x}. {z} only nodded and carried more "
    "water.",
    "{x} and {z} built a [raft|tent|snowman], and {y} gave it a name. It did not last [long|a day|an hour]. But it was the best one they "
    "had ever built.",
    "there was a [strange|loud|soft] noise on the roof. {x} was sure it was a ghost, and {y} was sure it was the wind. It was {z}, "
    "looking for a lost shoe.",
]
CLOSINGS = [
    "At the end of the week they all sat by the fire, and grandmother asked where everything was.",
    "When winter came, the friends tried to remember where everything was.",
    "On the last day the mayor came and asked them many questions.",
]


@dataclass
class Question:
    """One closing question. All offsets are characters into the story's text."""
    question: str       # "Where is the red key?"
    answer: str         # "The red key is in the attic."
    place: str          # "attic"
    fact_char: int      # start of the place word where the story tells it
    question_char: int  # start of the question
    answer_char: int    # start of the answer
    place_char: int     # start of the place word in the answer


@dataclass
class Story:
    text: str = ""
    questions: list = field(default_factory=list)


def pieces(text):
    """Words and punctuation marks in text: its tokens, if every word is one token."""
    return len(re.findall(r"\w+|[^\w ]", text))


def favour(rng, items, favourite, weight=5):
    """One of items; the favourite is `weight` times as likely as any other."""
    return favourite if rng.random() < weight / (weight + len(items) - 1) else rng.choice(items)


def after(items, item, step=1):
    """The item `step` places further in the list, around its end."""
    return items[(items.index(item) + step) % len(items)]


class Teller:
    """Writes one story. Keeps what was chosen last, so that each favourite differs from the one before."""

    def __init__(self, rng, even):
        self.rng, self.even = rng, even     # even: no favourites
        self.name, self.cast = NAMES[-1], []
        for _ in range(4):
            self.name = self.favour([n for n in NAMES if n not in self.cast], self.next_name(), weight=15)
            self.cast.append(self.name)
        self.time, self.scene, self.tail, self.reaction = TIMES[-1], SCENES[-1], TAILS[-1], AFTER_FACT[-1]
        self.place, self.verb = PLACES[0], VERBS[-1]
        self.told = set()       # scenes already told
        self.objects = []       # (colour, thing) already placed

    def favour(self, items, favourite, weight=5):
        return self.rng.choice(items) if self.even else favour(self.rng, items, favourite, weight)

    def next_name(self):
        """The next name in the list that this story does not have yet."""
        name = after(NAMES, self.name)
        while name in self.cast:
            name = after(NAMES, name)
        return name

    def person(self):
        self.name = self.favour(self.cast, after(self.cast, self.name), weight=9)
        return self.name

    def fill(self, template, people=None):
        """The template with its choices made and its people named."""
        x, y, z = people or self.people()
        he, his, him = ("he", "his", "him") if x in BOYS else ("she", "her", "her")

        def choose(match):
            options = match.group(1).split("|")
            return self.favour(options, options[0], weight=3)

        text = re.sub(r"\[([^]]*)\]", choose, template)
        here = self.rng.choice(PLACES) if "{here}" in text else ""
        return text.format(x=x, y=y, z=z, he=he, He=he.capitalize(), his=his, him=him, here=here)

    def people(self):
        x = self.person()
        return x, after(self.cast, x), after(self.cast, x, 2)

    def when(self):
        self.time = self.favour(TIMES, after(TIMES, self.time), weight=16)
        return self.time

    def a_scene(self):
        if len(self.told) == len(SCENES):
            self.told.clear()
        favourite = after(SCENES, self.scene)
        while favourite in self.told:
            favourite = after(SCENES, favourite)
        self.scene = self.favour([s for s in SCENES if s not in self.told], favourite, weight=50)
        self.told.add(self.scene)
        return self.fill(self.scene)

    def an_object(self):
        """A (colour, thing) that is new, but often has its colour or its noun in common with an earlier one."""
        while True:
            colour, thing = self.objects[-1] if self.objects else (COLOURS[-3], THINGS[-5])
            colour = self.favour(COLOURS, after(COLOURS, colour, 3), weight=12)
            thing = self.favour(THINGS, after(THINGS, thing, 5), weight=20)
            kind = self.rng.random()
            if len(self.objects) > 1 and kind < 0.2:
                colour = self.rng.choice(self.objects)[0]
            elif len(self.objects) > 1 and kind < 0.4:
                thing = self.rng.choice(self.objects)[1]
            if (colour, thing) not in self.objects:
                self.objects.append((colour, thing))
                return colour, thing

    def a_fact(self):
        """(sentence up to the place word, place, rest of the sentence, colour, thing)"""
        name, (colour, thing) = self.person(), self.an_object()
        self.verb = self.favour(VERBS, after(VERBS, self.verb), weight=4)
        self.place = self.favour(PLACES, after(PLACES, self.place, 7), weight=12)
        self.tail = favour(self.rng, TAILS, "", weight=9)
        return f"{name} {self.verb} the {colour} {thing} in the ", self.place, self.tail + ".", colour, thing

    def a_reaction(self):
        self.reaction = self.favour(AFTER_FACT, after(AFTER_FACT, self.reaction), weight=8)
        x = self.name
        return self.fill(self.reaction, (x, after(self.cast, x), after(self.cast, x, 2)))


def tell(split, index, facts=10, tokens=1000, plain=False):
    """The story number `index` of a split: `facts` objects, at most about `tokens` tokens (of one word each).

    Facts come first, then scenes as long as there is room, then one question per object. A plain story
    has neither opening nor scenes: facts, then questions, as dense as it gets, and without favourites, so that
    nothing but the facts tells the answers.
    """
    rng = random.Random(f"{split} {index} {facts} {tokens} {plain}")
    teller = Teller(rng, even=plain)
    story = Story(text="" if plain else teller.fill(rng.choice(OPENINGS[:1] * 3 + OPENINGS), teller.cast[:3]))
    used = pieces(story.text) + 2           # the tokens that open and end a text
    room = tokens - 20 - facts * 19         # a question and its answer take 17 tokens and a newline
    where = []                              # (colour, thing, place, offset of the place)
    while len(where) < facts:
        paragraph = "" if plain and not where else "\n" + teller.when() + " "
        for fact in range(min(facts - len(where), rng.choice((1, 2, 2, 3)))):
            before, place, rest, colour, thing = teller.a_fact()
            lead = "" if fact == 0 else rng.choice((" ", " ", " Then ", " But "))
            paragraph += lead + before
            where.append((colour, thing, place, len(story.text) + len(paragraph)))
            paragraph += place + rest
            if not plain and rng.random() < 0.65:
                paragraph += " " + teller.a_reaction()
        story.text += paragraph
        used += pieces(paragraph)
        # A scene among the facts, if the facts still to come (up to 35 tokens each) leave room for it.
        if not plain and rng.random() < 0.3 and used + 35 * (facts - len(where)) + 80 < room:
            scene = "\n" + teller.when() + " " + teller.a_scene()
            story.text += scene
            used += pieces(scene)
    while not plain:
        scene = "\n" + teller.when() + " " + teller.a_scene()
        used += pieces(scene)
        if used > room:
            break
        story.text += scene
    if not plain:
        story.text += "\n" + favour(rng, CLOSINGS, CLOSINGS[0], weight=4)
    while where:
        # The first one told is the likeliest, so that a model that asks has a clear next question.
        colour, thing, place, fact_char = where.pop(0 if not plain and rng.random() < 0.5 else rng.randrange(len(where)))
        question, stem = f"Where is the {colour} {thing}?", f"The {colour} {thing} is in the "
        start = len(story.text) + 1
        story.text += f"\n{question} {stem}{place}."
        answer = start + len(question) + 1
        story.questions.append(Question(question, stem + place + ".", place, fact_char, start, answer,
                                        answer + len(stem)))
    return story


class Parser(argparse.ArgumentParser):
    """Wrong input gets one line on stderr and exit status 2."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")


def main():
    parser = Parser(description="Writes short stories with questions at their end.")
    parser.add_argument("--split", choices=("train", "heldout"), default="heldout")
    parser.add_argument("--first", type=int, default=0, help="index of the first story")
    parser.add_argument("--stories", type=int, default=1)
    parser.add_argument("--facts", type=int, default=10, help="objects, and so questions, in a story")
    parser.add_argument("--tokens", type=int, default=1000, help="the longest a story may be, roughly")
    parser.add_argument("--json", action="store_true", help="a JSON object a line: text, questions and their answers")
    parser.add_argument("--tokenizer", metavar="DIR", help="with --json: adds ids and token positions")
    args = parser.parse_args()
    if not 1 <= args.facts <= len(COLOURS) * len(THINGS):
        parser.error(f"--facts {args.facts}: expected 1 to {len(COLOURS) * len(THINGS)}")
    if args.first < 0 or args.stories < 0 or args.tokens < 1:
        parser.error("--first and --stories must not be negative, --tokens must be positive")
    tokenizer = None
    if args.tokenizer:
        from tokenizers import Tokenizer
        try:
            tokenizer = Tokenizer.from_file(args.tokenizer + "/tokenizer.json")
        except Exception as error:
            parser.error(f"--tokenizer {args.tokenizer}: {error}")
    for index in range(args.first, args.first + args.stories):
        story = tell(args.split, index, args.facts, args.tokens)
        if not args.json:
            print(story.text + "\n")
            continue
        record = {"index": index, "text": story.text, "questions": [vars(q) for q in story.questions]}
        if tokenizer:
            encoding = tokenizer.encode(story.text)
            record["tokens"] = len(encoding.ids)
            for question in record["questions"]:
                fact, start = encoding.char_to_token(question["fact_char"]), encoding.char_to_token(question["answer_char"])
                question.update(fact_token=fact, answer_token=start, distance=start - fact)
        print(json.dumps(record))


if __name__ == "__main__":
    sys.exit(main())
