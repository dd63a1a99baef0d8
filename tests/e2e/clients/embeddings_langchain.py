"""langchain-openai's embeddings."""

from langchain_openai import OpenAIEmbeddings

from tests.e2e.clients.target import BASE_URL, MODEL


def main() -> None:
    """Run all."""
    model = OpenAIEmbeddings(model=MODEL, base_url=BASE_URL, api_key="unused", check_embedding_ctx_length=False)
    bird, stone = model.embed_documents(["A robin sings in the tree.", "Granite is a hard rock."])
    asked = model.embed_query("Which bird sings?")
    assert len(asked) == len(bird) == 384
    near, far = (sum(a * b for a, b in zip(asked, one, strict=True)) for one in (bird, stone))
    assert near > far + 0.2, (near, far)


main()
