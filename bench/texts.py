"""Texts of a given number of tokens, out of common English words.

A word that is one token after another word adds one token. So a text of such words has as many tokens as words, and its
beginning stays the same tokens whatever follows: prefixes that are equal as text are equal as tokens. Random token ids
lack both: their text often encodes to other tokens. A vocabulary that splits most words gets single letters, which are
one or two tokens each.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

from headrace.bench.tokens import Counter

_TEXT = """
the and for that with this from have they will one all would there their what out about who get which when make can
like time just him know take people into year your good some could them see other than then now look only come its over
think also back after use two how our work first well way even new want because any these give day most man woman child
world school state family student group country problem hand part place case week company system program question
government number night point home water room mother area money story fact month lot right study book eye job word
business issue side kind head house service friend father power hour game line end member law car city community name
president team minute idea body information parent face others level office door health person art war history party
result change morning reason research girl guy moment air teacher force education foot boy age policy music market
sense nation plan college interest death experience effect class control field development role effort rate heart drug
show light voice wife police mind price report decision son view relationship town road arm difference value building
action season society tax director position player record paper space ground form event official matter center couple
site project activity star table need court oil situation cost industry figure street image phone data picture practice
piece land product doctor wall patient worker news test movie north love step care south east west river garden winter
summer spring stone wood metal green blue red black white small large long short high low early late old young
"""
_WORDS = _TEXT.split()
_LETTERS = [*string.ascii_lowercase]
_NUM_BEGINNINGS = 16
_GROUP = 16
_MIN_WORDS = 32
_MAX_ROUNDS = 6


class Writer:
    """Writes texts from `words`. Each word adds `unit` tokens after another word. A text starts with one of
    `beginnings`, which have `first` tokens each. `around` is the number of special tokens that the server adds to a
    text."""

    def __init__(
        self,
        beginnings: Sequence[str],
        words: Sequence[str],
        counter: Counter,
        around: int,
        *,
        first: int = 1,
        unit: int = 1,
    ) -> None:
        self.beginnings = beginnings
        self.words = words
        self.counter = counter
        self.around = around
        self._first = first
        self._unit = unit

    def words_of(self, rng: random.Random, num_tokens: int) -> str:
        """Words that add this many tokens after other words, or as nearly as whole words allow; at least one."""
        return " ".join(rng.choices(self.words, k=max(1, round(num_tokens / self._unit))))

    def prompt(self, rng: random.Random, num_tokens: int) -> str:
        """A text that is this many tokens with those around it; at least one word."""
        return self.text(rng, num_tokens - self.around)

    def text(self, rng: random.Random, num_tokens: int) -> str:
        """A text of this many tokens, without those around it; at least one word."""
        first = rng.choice(self.beginnings)
        rest = num_tokens - self._first
        return f"{first} {self.words_of(rng, rest)}" if rest > 0 else first

    async def fitted(self, texts: Sequence[str], targets: Sequence[int], rng: random.Random) -> list[str]:
        """Texts of exactly so many tokens, made from nearly such ones by adding words or taking some off their ends. A
        text that cannot be made to fit stays as near as it came."""
        if not self.counter.is_exact:
            return list(texts)
        found = list(texts)
        open_ = list(range(len(found)))
        for _ in range(_MAX_ROUNDS):
            counts = await self.counter.count([found[i] for i in open_])
            wrong = [(i, targets[i] - n) for i, n in zip(open_, counts, strict=True)]
            open_ = []
            for i, missing in wrong:
                words, num_words = found[i].split(" "), round(missing / self._unit)
                if num_words > 0:
                    found[i] = f"{found[i]} {self.words_of(rng, missing)}"
                elif num_words < 0 and len(words) > 1:
                    found[i] = " ".join(words[: max(1, len(words) + num_words)])
                else:
                    continue
                open_.append(i)
            if not open_:
                break
        return found


async def writer_for(counter: Counter) -> Writer:
    """A writer with those words that are one token, or with letters if most words are several. Raises ExchangeError."""
    if not counter.is_exact:
        return Writer(_WORDS, _WORDS, counter, 0)
    beginnings = _WORDS[:_NUM_BEGINNINGS]
    alone = await counter.count([*beginnings, *_LETTERS])
    around = min(alone) - 1
    single = [word for word, count in zip(beginnings, alone, strict=False) if count == around + 1]
    words = await _single_words(counter, single[0], around) if single else []
    if len(words) >= _MIN_WORDS:
        return Writer(single, words, counter, around)
    base = _LETTERS[0]
    counts = await counter.count([base, *(f"{base} {letter}" for letter in _LETTERS)])
    added = [count - counts[0] for count in counts[1:]]
    unit = max(1, min(added))
    letters = [letter for letter, count in zip(_LETTERS, added, strict=True) if count == unit]
    return Writer([base], letters, counter, around, first=max(1, counts[0] - around), unit=unit)


async def _single_words(counter: Counter, first: str, around: int) -> list[str]:
    """The words that are one token after `first`. They are counted in groups, because a server needs one call for each
    text."""
    groups = [_WORDS[at : at + _GROUP] for at in range(0, len(_WORDS), _GROUP)]
    counts = await counter.count([" ".join((first, *group)) for group in groups])
    words: list[str] = []
    doubtful: list[str] = []
    for group, count in zip(groups, counts, strict=True):
        (words if count == around + 1 + len(group) else doubtful).extend(group)
    counts = await counter.count([f"{first} {word}" for word in doubtful])
    return words + [word for word, count in zip(doubtful, counts, strict=True) if count == around + 2]
