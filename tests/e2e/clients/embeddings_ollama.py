"""ollama-python's embeddings."""

import ollama

from tests.e2e.clients.target import BASE_URL, MODEL, refusal


def main() -> None:
    """Run all."""
    client = ollama.Client(host=BASE_URL.removesuffix("/v1"))
    answer = client.embed(MODEL, ["A robin sings in the tree.", "Granite is a hard rock."])
    (asked,) = client.embed(MODEL, "Which bird sings?").embeddings
    near, far = (sum(a * b for a, b in zip(asked, one, strict=True)) for one in answer.embeddings)
    assert near > far + 0.2
    assert len(client.embeddings(MODEL, "a").embedding) == 384
    assert client.show(MODEL).capabilities == ["embedding"]
    assert "not text generation" in str(refusal(ollama.ResponseError, lambda: client.generate(MODEL, "hi", raw=True)))


main()
