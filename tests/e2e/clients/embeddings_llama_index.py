"""llama-index's embeddings."""

from llama_index.embeddings.openai_like import OpenAILikeEmbedding

from tests.e2e.clients.target import BASE_URL, MODEL


def main() -> None:
    """Run all."""
    model = OpenAILikeEmbedding(model_name=MODEL, api_base=BASE_URL, api_key="unused", embed_batch_size=2)
    bird, stone, _ = model.get_text_embedding_batch(["A robin sings in the tree.", "Granite is a hard rock.", "Fog."])
    asked = model.get_query_embedding("Which bird sings?")
    assert len(asked) == len(bird) == 384
    assert model.similarity(asked, bird) > model.similarity(asked, stone) + 0.2


main()
