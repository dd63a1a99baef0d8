"""What happens to each field and parameter of Text Generation Inference (pure). TGI ignores those that it does not
know."""

from __future__ import annotations

from headrace.gateway.chat.sampling import MAX_CHOICES, MAX_LOGPROBS, MAX_STOP_STRINGS
from headrace.gateway.fields import Applied, FieldTable, Refused
from headrace.gateway.tgi.types import DEFAULT_NEW_TOKENS, TgiParameters, TgiRequest

_AS_COMPLETIONS = Applied("as for completions", "The default is neutral; the model's recommendation does not apply")

PARAMETERS = FieldTable(
    "Parameters of TGI",
    (TgiParameters,),
    {
        "max_new_tokens": Applied("1 or more", f"Default: {DEFAULT_NEW_TOKENS}"),
        "do_sample": Applied(
            "bool",
            "Sample instead of decoding greedily. A `temperature`, `top_p` or `typical_p` other than 1, or a `top_k`,"
            " also turns sampling on",
        ),
        "temperature": _AS_COMPLETIONS,
        "top_k": _AS_COMPLETIONS,
        "top_p": _AS_COMPLETIONS,
        "repetition_penalty": _AS_COMPLETIONS,
        "frequency_penalty": _AS_COMPLETIONS,
        "seed": Applied("64 bits"),
        "stop": Applied(f"up to {MAX_STOP_STRINGS} texts", "The answer includes the stop string"),
        "best_of": Applied(
            f"1 to {MAX_CHOICES}",
            "Number of answers from which to choose the one with the highest mean log-probability. Needs sampling; not"
            " in streams",
        ),
        "truncate": Applied("1 or more", "Keep only this many tokens from the end of the prompt"),
        "return_full_text": Applied("bool", "The text begins with the prompt"),
        "details": Applied("bool", "The answer has `details`"),
        "decoder_input_details": Applied(
            "bool", "`details.prefill` has the tokens of the prompt. Needs `details`; not in streams"
        ),
        "top_n_tokens": Applied(f"0 to {MAX_LOGPROBS}", "`top_tokens` has the most probable tokens at each position"),
        "grammar": Applied("object", "[Structured output](http-api.md#structured-output)"),
        "grammar.type": Applied("`json`, `json_schema`, `regex`"),
        "grammar.value": Applied("a schema, or an expression"),
        "adapter_id": Applied("name", "The model: adapters are selected by model name"),
        "typical_p": Applied("as for completions"),
        "watermark": Refused("leave it out", (False,)),
    },
)
REQUEST = FieldTable(
    "POST /generate, /generate_stream and /",
    (TgiRequest,),
    {
        "inputs": Applied("text", "The prompt"),
        "parameters": Applied("object", "See [parameters](#parameters-of-tgi)"),
        "stream": Applied("bool", "Only for `POST /`"),
        "model": Applied("name", "An extension for gateways with several models; for `/info`, a query parameter"),
    },
    members={"parameters": PARAMETERS},
)
TABLES = (REQUEST, PARAMETERS)
