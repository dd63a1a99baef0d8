"""Files of the shape of OVMS's demos, and tiny directories that pass for models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLM_GRAPH = """\
# File created with: OpenVINO Model Server
# OVMS_GRAPH_QUEUE_MAX_SIZE: AUTO
input_stream: "HTTP_REQUEST_PAYLOAD:input"
output_stream: "HTTP_RESPONSE_PAYLOAD:output"

node: {{
  name: "LLMExecutor"
  calculator: "HttpLLMCalculator"
  input_stream: "LOOPBACK:loopback"
  input_stream: "HTTP_REQUEST_PAYLOAD:input"
  input_side_packet: "LLM_NODE_RESOURCES:llm"
  input_side_packet: "LLM_NODE_EXECUTION_CONTEXTS:llm_ctx"
  output_stream: "LOOPBACK:loopback"
  output_stream: "HTTP_RESPONSE_PAYLOAD:output"
  input_stream_info: {{
    tag_index: 'LOOPBACK:0',
    back_edge: true
  }}
  node_options: {{
      [type.googleapis.com / mediapipe.LLMCalculatorOptions]: {{
          {options}
      }}
  }}
  input_stream_handler {{
    input_stream_handler: "SyncSetInputStreamHandler",
    options {{
      [mediapipe.SyncSetInputStreamHandlerOptions.ext] {{
        sync_set {{
          tag_index: "LOOPBACK:0"
        }}
      }}
    }}
  }}
}}
"""
TEXTS_GRAPH = """\
input_stream: "REQUEST_PAYLOAD:input"
output_stream: "RESPONSE_PAYLOAD:output"
node {{
  name: "{name}Executor"
  input_side_packet: "{packet}"
  calculator: "{name}CalculatorOV"
  input_stream: "REQUEST_PAYLOAD:input"
  output_stream: "RESPONSE_PAYLOAD:output"
  node_options: {{
    [type.googleapis.com / mediapipe.{name}CalculatorOVOptions]: {{
      {options}
    }}
  }}
}}
"""


def llm_graph(options: str = 'models_path: "./"') -> str:
    """A graph that generates text, as the demo of continuous batching has it."""
    return LLM_GRAPH.format(options=options)


def embeddings_graph(options: str = 'models_path: "./"') -> str:
    """A graph of the demo of embeddings."""
    return TEXTS_GRAPH.format(
        name="Embeddings", packet="EMBEDDINGS_NODE_RESOURCES:embeddings_servable", options=options
    )


def rerank_graph(options: str = 'models_path: "./"') -> str:
    """A graph of the demo of reranking."""
    return TEXTS_GRAPH.format(name="Rerank", packet="RERANK_NODE_RESOURCES:rerank_servable", options=options)


def model(path: Path, task: str = "text_generation") -> Path:
    """A directory whose files name a task, without weights."""
    path.mkdir(parents=True, exist_ok=True)
    names = {"text_generation": "beam_idx,logits", "embeddings": "last_hidden_state", "rerank": "logits"}[task]
    kind = "BertForSequenceClassification" if task == "rerank" else "SomeModel"
    (path / "config.json").write_text(json.dumps({"architectures": [kind]}))
    ports = "".join(f'<port names="{name}"/>' for name in names.split(","))
    (path / "openvino_model.xml").write_text(f"<net>{ports}</net>")
    (path / "openvino_model.bin").write_text("x")
    for stem in ("openvino_tokenizer", "openvino_detokenizer"):
        for suffix in ("xml", "bin"):
            (path / f"{stem}.{suffix}").write_text("x")
    return path


def repository(path: Path, graphs: dict[str, str], models: list[dict[str, Any]] | None = None) -> Path:
    """A repository with graphs by the name of their models, and entries of `model_config_list`. The path of its
    config.json."""
    for name, graph in graphs.items():
        task = "embeddings" if "EmbeddingsC" in graph else "rerank" if "RerankC" in graph else "text_generation"
        model(path / name, task)
        (path / name / "graph.pbtxt").write_text(graph)
    entries = [{"name": name, "base_path": name} for name in graphs]
    listed = [{"config": one} for one in models or []]
    config = path / "config.json"
    config.write_text(json.dumps({"model_config_list": listed, "mediapipe_config_list": entries}, indent=4))
    return config
