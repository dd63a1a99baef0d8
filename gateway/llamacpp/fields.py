"""What happens to each field of llama.cpp's own endpoints (pure). Its server ignores those that it does not know."""

from __future__ import annotations

from headrace.gateway.chat.fields import APPLIED, AS_CHATS, as_chats
from headrace.gateway.chat.request import AnswerFields, Tokenization
from headrace.gateway.chat.sampling import MAX_LOGPROBS, MAX_STOP_STRINGS
from headrace.gateway.fields import Applied, FieldTable, Hint, Refused, Row
from headrace.gateway.llamacpp.types import LlamaCompletion, LlamaInfill, LlamaTemplate

_SAMPLING = "use temperature, top_p, top_k or min_p"

_ROWS: dict[str, Row] = {
    "model": APPLIED["model"],
    "stream": Applied("bool", "Events of the answer's text, one by one"),
    "n_predict": Applied("-1 or more", "`max_tokens`. -1, the default: as many as the context allows. 0: none"),
    "stop": Applied(f"text, or up to {MAX_STOP_STRINGS} texts"),
    **as_chats(AnswerFields),
    "repeat_penalty": Applied("over 0, to 100", "`repetition_penalty`"),
    "repeat_last_n": Applied(
        "-1, 0, 64",
        "-1: penalties consider the whole prompt and answer. 0: no penalties. 64, llama.cpp's default, which clients"
        " send unasked, is a hint and means -1",
    ),
    "logit_bias": Applied("object, or pairs of a token's id and its bias", "False forbids a token"),
    "ignore_eos": Applied(AS_CHATS),
    "n_probs": Applied(f"0 to {MAX_LOGPROBS}", "`completion_probabilities` has this many alternatives to each token"),
    "return_tokens": Applied("bool", "The answer has its `tokens`"),
    "cache_prompt": Hint("prefixes are always cached", (True,)),
    "id_slot": Hint("the router places requests", (-1,)),
    "n_keep": Hint("a context is never shifted", (0,)),
    "n_discard": Hint("a context is never shifted", (0,)),
    "n_cache_reuse": Hint("prefixes are always cached", (0,)),
    "timings_per_token": Hint("the last event has the timings", (False,)),
    "return_progress": Hint("the first event comes with the first token", (False,)),
    "response_fields": Hint("answers have all fields", ([],)),
    "min_keep": Hint("filters keep at least one token", (0, 1)),
    "post_sampling_probs": Refused("use n_probs for the model's own distribution", (False,)),
    "n_indent": Refused("leave it out", (0,)),
    "t_max_predict_ms": Refused("use n_predict, or the header x-request-timeout", (0, -1)),
    "lora": Refused("name the adapter as the model", ([],)),
    "image_data": Refused("send images to /v1/chat/completions", ([],)),
    "multimodal_data": Refused("send images to /v1/chat/completions", ([],)),
    "grammar_lazy": Refused("leave it out: a grammar constrains the whole answer", (False,)),
    "grammar_triggers": Refused("leave it out: a grammar constrains the whole answer", ([],)),
    "tfs_z": Refused(_SAMPLING, (1,)),
    "n": Refused("send the prompt several times", (1,)),
}
COMPLETION = FieldTable(
    "POST /completion",
    (LlamaCompletion,),
    {
        "prompt": Applied("text, tokens, or a list of both", "A list that mixes texts and tokens is one prompt"),
        **_ROWS,
    },
)
INFILL = FieldTable(
    "POST /infill",
    (LlamaInfill,),
    {
        "input_prefix": Applied("text", "What is before the gap"),
        "input_suffix": Applied("text", "What is behind it"),
        "input_extra": Applied("list of `filename` and `text`", "Files that belong to it, the most relevant last"),
        "prompt": Applied("text", "Appended to `input_prefix`"),
        **_ROWS,
        "t_max_prompt_ms": Hint("the prompt is cut to the context, not by time", (0, -1)),
    },
)
APPLY_TEMPLATE = FieldTable(
    "POST /apply-template",
    (LlamaTemplate,),
    {
        **{name: Applied(AS_CHATS) for name in Tokenization.__struct_fields__ if name != "prompt"},
        "prompt": Refused("send messages"),
    },
)
TABLES = (COMPLETION, INFILL, APPLY_TEMPLATE)
