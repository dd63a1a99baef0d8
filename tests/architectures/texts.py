"""Made-up texts of mixed lengths, the same in every environment: most have a sentence or two, a few are long."""

from __future__ import annotations

import random

_WORDS = """
the of and to in is was for on that with as by at from are this be or an which not have has its were but
river mountain engine server memory winter summer protein planet violin market harbour copper garden museum
lightning bridge treaty orchestra glacier library satellite festival carpenter volcano parliament
quickly slowly never often measured painted described discovered repaired translated observed built forgotten
naïve café Zürich 東京 Москва 42 1969 3.14 e-mail don't state-of-the-art
"""
_ENDS = (".", ".", ".", "!", "?", ";", ":", " -")


def made_up_texts(number: int) -> list[str]:
    """So many texts of 1 to 200 words, log-normally distributed around 25."""
    rng, vocabulary = random.Random(20), _WORDS.split()
    texts = []
    for _ in range(number):
        num_words = max(1, min(200, int(rng.lognormvariate(3.2, 0.9))))
        words = [rng.choice(vocabulary) for _ in range(num_words)]
        for place in range(rng.randint(5, 15), num_words, rng.randint(8, 18)):
            words[place] += rng.choice(_ENDS)
        words[-1] += rng.choice(_ENDS)
        texts.append(" ".join(words).capitalize())
    return texts
