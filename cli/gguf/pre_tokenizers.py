"""How byte-level BPE tokenizers of GGUF files split a text before they merge, by the name in `tokenizer.ggml.pre`.

A name stands for regular expressions that are applied one after the other: every match, and every text between two
matches, is a piece, which the next expression splits further. No token spans two pieces. llama.cpp defines the names.
Its expressions are for another engine. Those here are for PCRE2, which openvino-tokenizers has, and split every
text alike, also where llama.cpp simplifies the original: to tekken and gpt-4o only A-Z are capitals, and to superbpe
only 0-9 are digits. `python -m tests.cli.llama_cpp` compares both.

PCRE2's compiled matcher has a small stack and finds nothing once that is full. So no group here repeats without bounds
unless it is possessive.
"""

from __future__ import annotations

from dataclasses import dataclass

# llama.cpp knows the characters of Unicode 15.1, PCRE2 those of a later version. These are in one of PCRE2's classes
# (letters, marks, numbers, punctuation, symbols), and to llama.cpp in none.
_LATER = {
    "L": (
        "88F C5C CDC 1C89-1C8A A7CB-A7CF A7D2 A7D4 A7DA-A7DC A7F1 105C0-105F3 10940-10959 10D4A-10D65 10D6F-10D85 "
        "10EC2-10EC7 11380-11389 1138B 1138E 11390-113B5 113B7 113D1 113D3 11BC0-11BE0 11DB0-11DDB 13460-143FA "
        "16100-1611D 16D40-16D6C 16EA0-16EB8 16EBB-16ED3 16FF2-16FF3 187F8-187FF 18CFF 18D09-18D1E 18D80-18DF2 "
        "1E5D0-1E5ED 1E5F0 1E6C0-1E6DE 1E6E0-1E6E2 1E6E4-1E6E5 1E6E7-1E6ED 1E6F0-1E6F4 1E6FE-1E6FF 2B73A-2B73F "
        "2CEA2-2CEAD 323B0-33479"
    ),
    "M": (
        "897 1ACF-1ADD 1AE0-1AEB 10D69-10D6D 10EFA-10EFC 113B8-113C0 113C2 113C5 113C7-113CA 113CC-113D0 113D2 "
        "113E1-113E2 11B60-11B67 11F5A 1611E-1612F 1E5EE-1E5EF 1E6E3 1E6E6 1E6EE-1E6EF 1E6F5"
    ),
    "N": (
        "10D40-10D49 116D0-116E3 11BF0-11BF9 11DE0-11DE9 16130-16139 16D70-16D79 16FF4-16FF6 1CCF0-1CCF9 1E5F1-1E5FA"
    ),
    "P": "1B4E-1B4F 1B7F 10D6E 10ED0 113D4-113D5 113D7-113D8 11BE1 16D6D-16D6F 1E5FF",
    "S": (
        "20C1 2427-2429 2B96 31E4-31E5 FBC3-FBD2 FD90-FD91 FDC8-FDCE 10D8E-10D8F 10ED1-10ED8 1CC00-1CCEF "
        "1CCFA-1CCFC 1CD00-1CEB3 1CEBA-1CED0 1CEE0-1CEF0 1F6D8 1F777-1F77A 1F8B2-1F8BB 1F8C0-1F8C1 1F8D0-1F8D8 "
        "1FA54-1FA57 1FA89-1FA8A 1FA8E-1FA8F 1FABE 1FAC6 1FAC8 1FACD 1FADC 1FADF 1FAE9-1FAEA 1FAEF 1FBCB-1FBEF "
        "1FBFA"
    ),
}


def _class(name: str) -> str:
    """The characters of a class, as llama.cpp knows them, as a term of `_any` and `_none`."""
    ranges = ("-".join(rf"\x{{{end}}}" for end in one.split("-")) for one in _LATER[name].split())
    return rf"(\p{{{name}}} - [{''.join(ranges)}])"


def _any(*terms: str, but: str = "") -> str:
    """An expression for one character that is in one of the sets `terms` and not in `but`."""
    return f"(?[ ({' + '.join(terms)}) - [{but}] ])" if but else f"(?[ {' + '.join(terms)} ])"


def _none(*terms: str) -> str:
    """An expression for one character that is in none of the sets `terms`."""
    return f"(?[ ! ({' + '.join(terms)}) ])"


_L, _M, _N, _P, _S = map(_class, "LMNPS")
_SPACES = r"\t-\r\x20\x85\xa0\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
_SPACE = f"[{_SPACES}]"
_NO_SPACE = f"[^{_SPACES}]"
_BREAK = r"[\r\n]"
_LETTER = _any(_L)
_NUMBER = _any(_N)
_LETTER_OR_MARK = _any(_L, _M)
_OTHER = _none(_SPACE, _L, _N)
_BEFORE = f"{_none(_BREAK, _L, _N)}?"
_SUFFIX = "'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
# A run of spaces, whose last one belongs to the word behind it.
_RUN = f"{_SPACE}+(?!{_NO_SPACE})|{_SPACE}+"
_LINES = f"{_SPACE}*{_BREAK}+|{_RUN}"
_THREE_DIGITS = "[0-9][0-9][0-9]"
_ASCII_PUNCTUATION = r"[!-/:-@\[-`{-~]"
_PUNCTUATION_AND_SIGNS = _any(_P, "[$+<=>^~|]")

_GPT2 = f"'(?:s|t|re|ve|m|ll|d)| ?{_LETTER}+| ?{_NUMBER}+| ?{_OTHER}+|{_RUN}"
_UP_TO_A_STOP = " ?[^" + _SPACES + r"(|.,!?\x{2026}\x{3002}\x{ff0c}\x{3001}\x{964}\x{6d4}\x{60c})]+"


def _words(numbers: str, lines: str = _LINES) -> str:
    """An expression for pieces: English suffixes such as 'll, words with at most one other character in front, numbers,
    and runs of other characters with the line breaks after them."""
    return f"{_SUFFIX}|{_words_without_suffixes(numbers, lines)}"


def _words_without_suffixes(numbers: str, lines: str = _LINES) -> str:
    return f"{_BEFORE}{_LETTER}+|{numbers}| ?{_OTHER}+{_BREAK}*|{lines}"


def _cased_words(numbers: str, suffix: str, *classes: str) -> str:
    """An expression for pieces in which a capital after a small letter begins a word. Letters outside ASCII count as
    both capital and small."""
    not_small = _any(*classes, but="a-z")
    not_capital = _any(*classes, but="A-Z")
    mixed = f"{_BEFORE}{not_small}*{not_capital}+{suffix}|{_BEFORE}{not_small}+{not_capital}*{suffix}"
    return f"{mixed}|{numbers}| ?{_OTHER}+[\r\n/]*|{_LINES}"


def _marked_words(numbers: str) -> str:
    return f"{_BEFORE}{_LETTER_OR_MARK}+(?:{_SUFFIX})?|{numbers}| ?{_OTHER}+[\r\n/]*|{_LINES}"


_LLAMA3 = _words(f"{_NUMBER}{{1,3}}")
_QWEN2 = _words(_NUMBER)
_QWEN35 = f"{_SUFFIX}|{_BEFORE}{_LETTER_OR_MARK}+|{_NUMBER}| ?{_none(_SPACE, _L, _M, _N)}+{_BREAK}*|{_LINES}"
_FALLING_RUNS = "|".join(
    f"{_SPACE}{{{n}}}(?!{_NO_SPACE})" for n in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")
)
_JAIS2 = _words(f"{_NUMBER}{{1,3}}", f"{_SPACE}*{_BREAK}+|{_FALLING_RUNS}|{_SPACE}")
_DEEPSEEK_WORD = f"{_ASCII_PUNCTUATION}[A-Za-z]+|{_none(_BREAK, _L, _P, _S)}?{_LETTER_OR_MARK}+| ?{_any(_P, _S)}+"
_DEEPSEEK = f"{_DEEPSEEK_WORD}{_BREAK}*|{_LINES}"
_KANA_AND_KANJI = r"[\x{4e00}-\x{9fa5}\x{3040}-\x{30ff}]+"
_FAR_EAST = rf"(?[ [\x{{800}}-\x{{9fa5}}\x{{ac00}}-\x{{d7ff}}] - {_SPACE} ])+"
_LATIN_GREEK_CYRILLIC = (
    r"[A-Za-z\x{b5}\x{c0}-\x{d6}\x{d8}-\x{f6}\x{f8}-\x{1ba}\x{1bc}-\x{1bf}\x{1c4}-\x{293}\x{295}-\x{2af}"
    r"\x{370}-\x{373}\x{376}\x{377}\x{37b}-\x{37d}\x{37f}\x{386}\x{388}-\x{38a}\x{38c}\x{38e}-\x{3a1}"
    r"\x{3a3}-\x{3f5}\x{3f7}-\x{481}\x{48a}-\x{52f}\x{531}-\x{556}\x{10a0}-\x{10c5}\x{13a0}-\x{13f5}"
    r"\x{13f8}-\x{13fd}\x{1c90}-\x{1cba}\x{1cbd}-\x{1cbf}\x{1d00}-\x{1d2b}\x{1d6b}-\x{1d77}\x{1d79}-\x{1d9a}"
    r"\x{1e00}-\x{1f15}\x{1f18}-\x{1f1d}\x{1f20}-\x{1f45}\x{1f48}-\x{1f4d}\x{1f50}-\x{1f57}\x{1f59}\x{1f5b}"
    r"\x{1f5d}\x{1f5f}-\x{1f7d}\x{1f80}-\x{1fb4}\x{1fb6}-\x{1fbc}\x{1fbe}\x{1fc2}-\x{1fc4}\x{1fc6}-\x{1fcc}"
    r"\x{1fd0}-\x{1fd3}\x{1fd6}-\x{1fdb}\x{1fe0}-\x{1fec}\x{1ff2}-\x{1ff4}\x{1ff6}-\x{1ffc}\x{2102}\x{2107}"
    r"\x{210a}-\x{2113}\x{2115}\x{2119}-\x{211d}\x{2124}\x{2126}\x{2128}\x{212a}-\x{212d}\x{212f}-\x{2134}\x{2139}"
    r"\x{213c}-\x{213f}\x{2145}-\x{2149}\x{214e}\x{2183}\x{2184}\x{2c00}-\x{2c7b}\x{2c7e}-\x{2ce4}"
    r"\x{2ceb}-\x{2cee}\x{2cf2}\x{2cf3}\x{a640}-\x{a66d}\x{a680}-\x{a69b}\x{a722}-\x{a76f}\x{a771}-\x{a787}"
    r"\x{a78b}-\x{a78e}\x{ab70}-\x{abbf}\x{fb00}-\x{fb06}\x{fb13}-\x{fb17}\x{ff21}-\x{ff3a}\x{ff41}-\x{ff5a}"
    r"\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}"
    r"\x{118a0}-\x{118df}\x{1e900}-\x{1e943}]+"
)
_HAN = r"[\x{4e00}-\x{9fff}\x{3400}-\x{4dbf}\x{20000}-\x{2a6df}\x{2a700}-\x{2ebef}\x{f900}-\x{faff}\x{2f800}-\x{2fa1f}]"
_KIMI_WORD = f"{_BEFORE}(?[ {_L} - {_HAN} ])+(?:{_SUFFIX})?"
_KIMI = f"{_HAN}+|{_KIMI_WORD}|{_NUMBER}{{1,3}}| ?{_OTHER}+{_BREAK}*|{_LINES}"
_YOUTU_SCRIPTS = (
    r"[\x{ac00}-\x{d7a3}\x{3131}-\x{318e}]+"
    r"|[\x{ff01}\x{2026}\x{201c}\x{201d}\x{2018}\x{2019}\x{2014}\x{ff1a}\x{ff1b}\x{ff0c}\x{3001}-\x{303f}\x{fe30}-\x{fe4f}]+"
    rf"|[\x{{3105}}-\x{{312f}}]+|{_KANA_AND_KANJI}"
)
_ASIAN_SCRIPTS = (
    r"[\x{4e00}-\x{9fff}\x{3400}-\x{4dbf}\x{8c48}-\x{faff}\x{3040}-\x{30ff}\x{ff65}-\x{ff9f}\x{2f00}-\x{2fdf}"
    r"\x{e40}-\x{e7f}\x{e80}-\x{eff}\x{1780}-\x{17ff}\x{1000}-\x{109f}\x{aa60}-\x{aa7f}\x{a9e0}-\x{a9ff}"
    r"\x{ac00}-\x{d7af}\x{1100}-\x{11ff}]+"
)
# Numbers in threes, counted from their end. The first ones stay with the text before them.
_NUMBERS_FROM_THE_END = f"{_none(_N)}*+{_NUMBER}{{1,3}}(?=(?:{_NUMBER}{{3}})*+(?!{_NUMBER}))"
_SUPERBPE_NUMBERS = r"[\s\S]+?(?=(?:[0-9]{3})++(?![0-9])|\z)"
_EXAONE_WORDS = f"{_BEFORE}{_LETTER}(?>{_LETTER_OR_MARK}++| {_LETTER})*+"
_EXAONE_MOE = f"{_SUFFIX}|{_EXAONE_WORDS}|{_NUMBER}| ?{_OTHER}+[\r\n/]?|{_SPACE}*{_BREAK}|{_RUN}"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`patterns`: the expressions. `takes_whole_pieces`: a piece that is a token is that token, whatever its merges
    give. `adds_bos`: whether the beginning-of-sequence token comes first unless the file says otherwise."""

    patterns: tuple[str, ...]
    takes_whole_pieces: bool = False
    adds_bos: bool = False


def _named(
    names: str, *patterns: str, takes_whole_pieces: bool = False, adds_bos: bool = False
) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names.split(), PreTokenizer(patterns, takes_whole_pieces, adds_bos))


DEFAULT = "default"
"""The name for files that name none."""
PRE_TOKENIZERS = {
    **_named(DEFAULT, f"{_PUNCTUATION_AND_SIGNS}+", _GPT2, f"{_NUMBER}+", _THREE_DIGITS),
    **_named(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        _LLAMA3,
        takes_whole_pieces=True,
        adds_bos=True,
    ),
    **_named("dbrx smaug-bpe chatglm-bpe", _LLAMA3),
    **_named("glm4 glm5", _LLAMA3, takes_whole_pieces=True),
    **_named(
        "gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe gigachat a.x-4.0 mellum "
        "modern-bert mpt olmo jais trillion granite-docling exaone4",
        _GPT2,
    ),
    **_named("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", _NUMBER, _GPT2),
    **_named("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", _QWEN2),
    **_named("qwen35", _QWEN35),
    **_named("ufakzeka", _words_without_suffixes(_NUMBER)),
    **_named("laguna", r"[^\n]+|\n+", _QWEN2),
    **_named("jais-2", _JAIS2),
    **_named(
        "deepseek-llm",
        _BREAK,
        f"{_SPACE}?{_LATIN_GREEK_CYRILLIC}",
        rf"{_SPACE}?[!-/:-~\x{{ff01}}-\x{{ff0f}}\x{{ff1a}}-\x{{ff5e}}\x{{2018}}-\x{{201f}}\x{{3001}}\x{{3002}}]+",
        rf"{_SPACE}+\z",
        _FAR_EAST,
        f"{_NUMBER}+",
    ),
    **_named("deepseek-coder", _BREAK, f"{_SPACE}?{_LETTER}+", f"{_SPACE}?{_any(_P)}+", _FAR_EAST, _NUMBER),
    **_named("deepseek-v3 hunyuan-dense joyai-llm hy_v4", f"{_NUMBER}{{1,3}}", _KANA_AND_KANJI, _DEEPSEEK),
    **_named("spark2_5", f"{_NUMBER}{{1,3}}", _KANA_AND_KANJI, f"{_DEEPSEEK_WORD}|{_BREAK}|{_RUN}", _NUMBER),
    **_named("falcon", f"{_any(_P, '[$+<=>^~|`]')}+", _GPT2, _THREE_DIGITS),
    **_named("poro-chat bloom gpt3-finnish", _UP_TO_A_STOP),
    **_named("viking", _UP_TO_A_STOP, _NUMBER),
    **_named("tekken", _cased_words(_NUMBER, "", _L), takes_whole_pieces=True, adds_bos=True),
    **_named("gpt-4o llama4 kanana2 talkie minimax-m2", _cased_words(f"{_NUMBER}{{1,3}}", f"(?:{_SUFFIX})?", _L)),
    **_named(
        "granite-embed-multi-97m",
        _cased_words(f"{_NUMBER}{{1,3}}", f"(?:{_SUFFIX})?", _L, _M),
        takes_whole_pieces=True,
    ),
    **_named("tiny_aya cohere2moe", _NUMBERS_FROM_THE_END, _marked_words(f"{_NUMBER}{{1,3}}")),
    **_named("youtu", _YOUTU_SCRIPTS, _marked_words(_NUMBER), takes_whole_pieces=True),
    **_named("kimi-k2", _KIMI),
    **_named("superbpe", f"{_NUMBER}+", _SUPERBPE_NUMBERS),
    **_named("bailingmoe bailingmoe2 llada-moe", _words(_NUMBER, f"{_SPACE}*{_BREAK}|{_RUN}")),
    **_named("seed-coder", f"{_SUFFIX}|{_BEFORE}{_LETTER}+|{_NUMBER}| ?{_OTHER}+|{_LINES}"),
    **_named("afmoe", _NUMBERS_FROM_THE_END, _ASIAN_SCRIPTS, _DEEPSEEK),
    **_named("exaone-moe", _EXAONE_MOE),
    **_named("minicpm5", f"{_NUMBER}{{1,3}}", _words(f"{_NUMBER}+"), takes_whole_pieces=True),
    **_named(
        "chameleon",
        "<sentinel:[0-9]+>",
        "IMGIMG[A-I]{1,4}Z",
        r"[\t\n]|    |  ",
        _NUMBER,
        _any(_P, _ASCII_PUNCTUATION),
        _GPT2,
        adds_bos=True,
    ),
}
"""What the names mean. Names of encoders are among them, as they are names of the same expressions."""
