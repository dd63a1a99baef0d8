"""What happens to each field and option of Ollama's API (pure). Ollama ignores fields that it does not know."""

from __future__ import annotations

from headrace.gateway.chat.sampling import MAX_STOP_STRINGS
from headrace.gateway.fields import Applied, FieldTable, Hint, Refused, Row
from headrace.gateway.ollama.types import (
    OllamaChat,
    OllamaCopy,
    OllamaCreate,
    OllamaDelete,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaGenerate,
    OllamaOptions,
    OllamaPull,
    OllamaShow,
)

_AS_CHATS = "as for chats"
_LOADING = "it concerns the loading of a model in Ollama's own engine"
_IMAGES = Applied("files as base64", "In front of the text. [Images](http-api.md#images)")
_SAMPLING = "use temperature, top_p, top_k or min_p"
_MODEL = Applied("name", "May end in `:latest`. Optional while there is only one model")
_KEEP_ALIVE = Applied(
    "seconds, or a duration such as 5m",
    "Checked, but a hint: the operator decides how long a model stays loaded. 0 without a prompt is answered with"
    " `unload`, as Ollama does. With `--ollama-manage`, a model that requests load is unloaded when no request has used"
    " it for so long, with 0 after the answer. The latest request decides; without the field, and if it is negative,"
    " `--idle-s` does",
)

_OF_ANSWERS: dict[str, Row] = {
    "model": _MODEL,
    "format": Applied("`json`, or a JSON schema", "As `response_format`"),
    "think": Applied(
        "bool, `low`, `medium`, `high`, `max`",
        "As `reasoning_effort`; the default depends on the model. A hint for models that do not reason. False is"
        " refused if the model reasons and cannot switch it off",
    ),
    "logprobs": Applied("bool", "The answer has `logprobs`: `{token, logprob, bytes, top_logprobs}` for each token"),
    "top_logprobs": Applied("0 to 20", "Needs `logprobs`"),
    "stream": Applied("bool, default true", "A stream is lines of JSON"),
    "options": Applied("object", "See [options](#options-of-ollama)"),
    "keep_alive": _KEEP_ALIVE,
    "chat_template": Applied("name", "A template of the operator's list, as for chats. Not with `raw` or `suffix`"),
    "truncate": Hint("a prompt that is too long is refused", (False,)),
    "shift": Hint("an answer ends where the context does, with done_reason length", (False,)),
}
OPTIONS = FieldTable(
    "Options of Ollama",
    (OllamaOptions,),
    {
        "num_predict": Applied(
            "integer", "`max_tokens`. 0, negative values and the default: as many as the model and its context allow"
        ),
        "num_ctx": Applied(
            "1 or more",
            "Prompt and answer together have at most this many tokens. More than the model's context, which `/api/ps`"
            " shows, means that context",
        ),
        "temperature": Applied(_AS_CHATS),
        "top_k": Applied(_AS_CHATS),
        "top_p": Applied(_AS_CHATS),
        "min_p": Applied(_AS_CHATS),
        "presence_penalty": Applied(_AS_CHATS),
        "frequency_penalty": Applied(_AS_CHATS),
        "seed": Applied("integer", "-1 means a random seed"),
        "stop": Applied(f"text, or up to {MAX_STOP_STRINGS} texts"),
        "repeat_penalty": Applied("over 0 to 100", "`repetition_penalty`. Default: the model's"),
        "repeat_last_n": Applied(
            "-1, 0, 64",
            "-1: penalties consider the whole prompt and answer. 0: no penalties. 64, Ollama's default, which clients"
            " send unasked, is a hint and means -1",
        ),
        "typical_p": Applied(_AS_CHATS),
        "tfs_z": Refused(_SAMPLING, (1,)),
        "mirostat": Applied(_AS_CHATS),
        "mirostat_tau": Applied(_AS_CHATS),
        "mirostat_eta": Applied(_AS_CHATS),
        "num_keep": Hint("a context is never shifted"),
        "penalize_newline": Hint("newer versions of Ollama ignore it, too", (True,)),
        **{
            name: Hint(_LOADING)
            for name in (
                "num_batch",
                "num_gpu",
                "main_gpu",
                "num_thread",
                "numa",
                "low_vram",
                "f16_kv",
                "use_mmap",
                "use_mlock",
                "vocab_only",
                "logits_all",
                "embedding_only",
            )
        },
    },
)
CHAT = FieldTable(
    "POST /api/chat",
    (OllamaChat,),
    {
        "messages": Applied(
            "list",
            "Roles `system`, `user`, `assistant` and `tool`. If the last message is the assistant's, the model"
            " continues it. Without messages, the call only checks the model",
        ),
        "messages[].role": Applied("text", "See `messages`"),
        "messages[].content": Applied("text", "Missing means empty"),
        "messages[].thinking": Applied("text", "The reasoning of an earlier turn"),
        "messages[].tool_calls": Applied("list", "Arguments are objects"),
        "messages[].tool_name": Applied("text", "Of a result"),
        "messages[].tool_call_id": Applied("text", "Of a result"),
        "messages[].images": _IMAGES,
        "tools": Applied("list", "As for chats. The model chooses"),
        **_OF_ANSWERS,
    },
    members={"options": OPTIONS},
)
GENERATE = FieldTable(
    "POST /api/generate",
    (OllamaGenerate,),
    {
        "prompt": Applied(
            "text",
            "A turn of the user, formatted by the chat template. A model without a template continues it. Without a"
            " prompt, the call only checks the model",
        ),
        "system": Applied("text", "A system turn before the prompt"),
        "raw": Applied("bool", "Do not apply the chat template. Excludes `system`, `context` and `think`"),
        "context": Applied(
            "tokens",
            "The `context` of an earlier answer, which contains its prompt and text. The new prompt is appended to it",
        ),
        **_OF_ANSWERS,
        "suffix": Applied(
            "text",
            "The answer is what goes between prompt and suffix, without a chat template. Excludes `system`, `context`,"
            " `think` and `images`. Models without tokens for it refuse it",
        ),
        "template": Refused("name one of the operator's with chat_template, or use raw to send a whole prompt", ("",)),
        "images": _IMAGES,
        "width": Refused("the models write texts only", (0,)),
        "height": Refused("the models write texts only", (0,)),
        "steps": Refused("the models write texts only", (0,)),
    },
    members={"options": OPTIONS},
)
EMBED = FieldTable(
    "POST /api/embed",
    (OllamaEmbed,),
    {
        "model": _MODEL,
        "input": Applied("text, or list of texts"),
        "truncate": Applied("bool, default true", "Truncate a text that is too long, rather than refuse it"),
        "dimensions": Applied("1 or more", "As of [embeddings](http-api.md#embeddings)"),
        "keep_alive": _KEEP_ALIVE,
        "options": Hint("options concern texts that a model writes", ({},)),
    },
)
EMBEDDINGS = FieldTable(
    "POST /api/embeddings",
    (OllamaEmbeddings,),
    {
        "model": _MODEL,
        "prompt": Applied("text"),
        "keep_alive": _KEEP_ALIVE,
        "options": Hint("options concern texts that a model writes", ({},)),
    },
)
SHOW = FieldTable(
    "POST /api/show",
    (OllamaShow,),
    {
        "model": _MODEL,
        "name": Applied("name", "An older name of `model`"),
        "verbose": Hint("there is nothing more to show", (False,)),
        "system": Hint("the answer describes the model as it is served", ("",)),
        "template": Hint("the answer describes the model as it is served", ("",)),
        "options": Hint("the answer describes the model as it is served", ({},)),
    },
)
PULL = FieldTable(
    "POST /api/pull",
    (OllamaPull,),
    {
        "model": _MODEL,
        "name": Applied("name", "An older name of `model`"),
        "stream": Applied("bool, default true"),
        "insecure": Hint("nothing is downloaded", (False,)),
        "username": Hint("nothing is downloaded", ("",)),
        "password": Hint("nothing is downloaded", ("",)),
    },
)
_EACH_REQUEST = "send it in each request"
CREATE = FieldTable(
    "POST /api/create",
    (OllamaCreate,),
    {
        "model": Applied("name", "The new name"),
        "name": Applied("name", "An older name of `model`"),
        "from": Applied("name", "A model of the host, or another name of one. Either this or `files`"),
        "files": Applied(
            "object of names and digests",
            "One GGUF file, or all pieces of one, sent to `POST /api/blobs/:digest` before. Needs `--ollama-blobs`;"
            " without, the operator adds models with `headrace models load`",
            neutral=({},),
        ),
        "stream": Applied("bool, default true"),
        "system": Refused(_EACH_REQUEST, ("",)),
        "parameters": Refused("send them as options of each request", ({},)),
        "messages": Refused(_EACH_REQUEST, ([],)),
        "template": Refused("the operator names templates with --chat-template", ("",)),
        "license": Hint("a name has no licence", ("", [])),
        "adapters": Refused("the operator adds adapters with headrace adapters load", ({},)),
        "quantize": Refused(
            "the weights of a GGUF file keep their values; send a file of the quantisation that you want, or ask the"
            " operator for headrace pull OWNER/NAME --weights",
            ("",),
        ),
        "modelfile": Refused("use from", ("",)),
        "path": Refused("use from", ("",)),
    },
)
COPY = FieldTable(
    "POST /api/copy",
    (OllamaCopy,),
    {"source": Applied("name", "A model of the host, or another name of one"), "destination": Applied("name")},
)
DELETE = FieldTable(
    "DELETE /api/delete",
    (OllamaDelete,),
    {
        "model": Applied("name", "A name that copy or create has given, or a model that create has made of files"),
        "name": Applied("name", "An older name of `model`"),
    },
)
TABLES = (CHAT, GENERATE, OPTIONS, EMBED, EMBEDDINGS, SHOW, PULL, CREATE, COPY, DELETE)
