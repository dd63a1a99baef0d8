"""Names of the files of a model directory."""

from __future__ import annotations

TEMPLATE_FILES = ("chat_template.jinja", "template.jinja", "tokenizer.jinja")
"""Files that are a chat template as they are. The first one that exists counts. OVMS reads template.jinja."""
NAMED_TEMPLATE_FILES = {
    "tool_use": "additional_chat_templates/tool_use.jinja",
    "rag": "additional_chat_templates/rag.jinja",
}
"""Chat templates for some requests only, by name. Transformers saves them in files of their own."""
TEMPLATES = (*TEMPLATE_FILES, *NAMED_TEMPLATE_FILES.values(), "chat_template.json")
"""All files other than tokenizer_config.json that may have chat templates."""
BUNDLE_FILES = (
    *TEMPLATES,
    "config.json",
    "generation_config.json",
    "openvino_detokenizer.bin",
    "openvino_detokenizer.xml",
    "openvino_tokenizer.bin",
    "openvino_tokenizer.xml",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
"""The files of the tokenizer bundle, which a worker serves as far as they exist."""
PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"
IMAGE_FILES = (PREPROCESSOR, PROCESSOR)
"""The files that say how images become pixels and tokens. They are in the bundle of a model whose images are served."""
