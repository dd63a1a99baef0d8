"""Lines of mixed text and code that are the same at every call, and small vocabularies that tell how they are split.

The merges were learned from other such lines without splitting them, so they reach across the ends of words: wherever
a tokenizer splits in the wrong place, ids differ.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence


def _words(text: str) -> list[str]:
    return text.split()


WORDS = _words(
    "the of and a to in is you that it he was for on are as with his they I at be this have from or one had by word "
    "tokenization unbelievable internationalisation Straße Größe naïve façade crème brûlée Ærøskøbing Łódź Čeština "
    "İstanbul ılık ğüşöç Việt Nam tiếng ệ ǅ ǆ ŉ ﬁ ﬂ ﬃ ſ K Å µ ª º привет мир Россия Ёлка ёж українська їжак ћирилица "
    "Ελλάδα καλημέρα ΌΜΙΚΡΟΝ ώρα שלום עברית שָׁלוֹם مرحبا العربية مُحَمَّد فارسی اردو नमस्ते हिन्दी क्षेत्र বাংলা ক্ষমা தமிழ் తెలుగు "
    "ಕನ್ನಡ മലയാളം සිංහල ไทย สวัสดี กำลัง ລາວ ພາສາ မြန်မာ ភាសាខ្មែរ ქართული Հայերեն አማርኛ ᏣᎳᎩ ꮳꮃꭹ 한국어 안녕하세요 각 ㄱㅏ "
    "ÉCOLE STRAẞE ПРИВЕТ ЁЖ ΕΛΛΆΔΑ ÇĞŞ ÅNGström éCole МирОм "
    "日本語 ひらがな カタカナ ｶﾀｶﾅ 漢字 中文 简体字 繁體字 ㄅㄆㄇ 㐀㐁 𠀀𠀁 𪜀 〆 々 𐐀𐐨 𝔘𝔫𝔦 𝒳𝒴 "
    "ᠮᠣᠩᠭᠣᠯ བོད་ཡིག ⲀⲁⲂ ⰀⰁ Ａｂｃ ⓐⓑ"
)
IDENTIFIERS = _words(
    "foo_bar camelCase PascalCase SCREAMING_SNAKE HTTPServer getElementById x1 i18n __init__ self std::vector a.b.c "
    "$var @decorator #include &amp; <div> </span> func() arr[0] {k:v} x->y a!=b i++ --flag -Wall /usr/bin C:\\dir "
    "user@host.org https://a.b/c?d=e&f=%20g 0xDEADBEEF 1e-9 3.14159 1_000_000 v1.2.3-rc4 2024-01-31T23:59:59Z 50% 10GB"
)
CODE = (
    'def f(x: int) -> str:\n    return f"{x!r:>10}"\n',
    "for (int i = 0; i < n; ++i) {\n\t\tsum += a[i] * 2;\n\t}\n",
    "SELECT * FROM t WHERE id IN (1, 22, 333) AND name LIKE '%o''clock%';",
    '{"key": [1, 2.5, -3e10, null, true], "s": "a\\nb\\u00e9"}',
    "<a href=\"x.html\" class='y'>It&#39;s</a><!-- no -->",
    'if err != nil {\r\n\treturn nil, fmt.Errorf("bad: %w", err)\r\n}\r\n',
    "let x = y?.z ?? (() => {})(); // TODO: fix!!!",
    "#!/bin/sh\nset -eu; echo \"$HOME\" | sed -e 's/[0-9]\\+/N/g' >>out.txt 2>&1",
    "\\frac{\\partial^2 u}{\\partial x^2} = \\alpha_{i,j} $$ \\sum_{k=1}^{n} k^2 $$",
    "A[i][j]=B[j][i]*0.5f;/*swap*/",
)
ENDINGS = _words("'s 'S 't 'T 're 'RE 'Re 've 'VE 'm 'M 'll 'LL 'lL 'd 'D 'x ’s ’ll 'sa 'tis '' ' 'é 're.")
NUMBERS = _words("٣٤٥ ۱۲۳ १२३४ ৪৫ ๑๒๓ ១២ ፩፪ ² x³ ½ ¾ Ⅻ ⅷ ① ⑳ 〇 一二三 𝟘𝟙𝟚 １２３ 𐒠")
SIGNS = _words(
    "! ? . , ; : - -- --- ... … — – · • « » „ “ ” ‘ ’ ‚ ‹ › ¡ ¿ § ¶ † ‡ 、 。 ！ ？ ， ： ； （ ） "
    "「 」 『 』 〜 ～ ・ ‥ ﹏ ︰ । ॥ ۔ ، ؟ ؛ ՞ ፡ ። ༎ "
    "+ = < > | ~ ^ ` $ € £ ¥ ₿ © ® ™ ° ± × ÷ ≠ ≤ ∑ ∫ √ ∞ → ⇒ ↔ ■ ▶ ☃ ♥ ✓ @ # % & * / \\ _ ( ) [ ] { } \" '"
)
EMOJI = _words("😀 😂🤣 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 ❤️ ☎️ 1️⃣ #️⃣ 🫠 🧑🏿‍🚀 🐈‍⬛ ✨✨✨ 🙂‍↔️ 🫩 🪏")
SPACES = (
    " ",
    "  ",
    "   ",
    "    ",
    "        ",
    "\t",
    "\t\t",
    " \t ",
    "\n",
    "\n\n",
    "\r\n",
    "\r\n\r\n",
    " \n",
    "\n  ",
    "\r",
)
ODD_SPACES = tuple("\u00a0\u3000\u2003\u2009\u202f\u0085\u180e\u200b\ufeff\u2028\u2029\u1680\x0b\x0c\x1c\x1f\x7f\x01")
MARKS = _words("\u0301 \u0308 \u0327 \u093c \u064b \u05b8 \u0e31 \u20dd \ufe0f \u200d \u200c \u1abf")
SPECIAL = (
    "<|bos|>",
    "<|eos|>",
    "<tool_call>",
    "</tool_call>",
    "<unused0>",
    "<unk>",
    "x<|eos|>",
    "<|bos",
    "eos|>",
    "~~~~",
    "~~~~~",
)
# Characters that a later version of Unicode than llama.cpp's classifies.
LATER = ("\u1c89\ua7cb\ua7da", "\U00010d40\U00010d41", "\u0897", "\u1b4e", "\U0001cc00\U0001fae9", "\u088f")


class _Draw:
    """A stream of choices, the same in every version of Python."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, number: int) -> int:
        return int(self._random.random() * number)

    def one(self, of: Sequence[str]) -> str:
        return of[self.below(len(of))]


def lines(count: int, seed: int = 1) -> Iterator[str]:
    """`count` lines; the first ones of a seed are always the same. Some contain line ends."""
    draw = _Draw(seed)
    for _ in range(count):
        yield _line(draw)


def _line(draw: _Draw) -> str:
    length = draw.below(12) + 1 if draw.below(100) else draw.below(400) + 100
    kinds = [_KINDS[draw.below(len(_KINDS))] for _ in range(draw.below(5) + 1)]
    parts = []
    for _ in range(length):
        parts.append(kinds[draw.below(len(kinds))](draw))
        parts.append(" " if draw.below(3) else draw.one(("", "", *SPACES)))
    return "".join(parts if draw.below(4) else parts[:-1])


def _case(draw: _Draw) -> str:
    word = draw.one(WORDS)
    if not word.isascii():  # Python's own tables of characters differ with its version
        return word
    return (word, word, word, word.upper(), word.title(), word.swapcase())[draw.below(6)]


def _number(draw: _Draw) -> str:
    digits = "".join(str(draw.below(10)) for _ in range(draw.below(12) + 1))
    return (digits, digits, f"{digits}.{digits[:2]}", f"-{digits}", f"{digits[:3]},{digits}", draw.one(NUMBERS))[
        draw.below(6)
    ]


def _any_character(draw: _Draw) -> str:
    upper = (0x80, 0x250, 0x3000, 0x10000, 0x20000, 0x110000)[draw.below(6)]
    code = draw.below(upper)
    return "\ufffd" if 0xD800 <= code < 0xE000 else chr(code)


_KINDS: tuple[Callable[[_Draw], str], ...] = (
    _case,
    _case,
    _case,
    lambda draw: _case(draw) + draw.one(ENDINGS),
    lambda draw: draw.one(IDENTIFIERS),
    lambda draw: draw.one(IDENTIFIERS),
    lambda draw: draw.one(CODE),
    _number,
    _number,
    lambda draw: draw.one(SIGNS) * (draw.below(3) + 1),
    lambda draw: draw.one(SIGNS) + _case(draw) + draw.one(SIGNS),
    lambda draw: draw.one(EMOJI),
    lambda draw: draw.one(SPACES) + draw.one(ODD_SPACES) + draw.one(SPACES),
    lambda draw: _case(draw) + draw.one(MARKS) + draw.one(("", _case(draw))),
    lambda draw: draw.one(NUMBERS) + _number(draw),
    lambda draw: draw.one(SPECIAL),
    lambda draw: "".join(_any_character(draw) for _ in range(draw.below(6) + 1)),
    lambda draw: draw.one(LATER) + _case(draw) + draw.one(LATER),
    lambda draw: (_case(draw) + draw.one(("", " "))) * (draw.below(8) + 1),
    lambda draw: draw.one((" ", "\n", "\t", "a", "=", "一", "9", "é")) * (draw.below(40) + 1),
)
