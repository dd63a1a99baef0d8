"""What happens to each field of batches (pure)."""

from __future__ import annotations

from headrace.gateway.batches.types import CreateBatch
from headrace.gateway.fields import Applied, FieldTable

BATCH = FieldTable(
    "POST /v1/batches",
    (CreateBatch,),
    {
        "input_file_id": Applied("id", "A file of this tenant with `purpose` `batch`"),
        "endpoint": Applied(
            "`/v1/chat/completions`, `/v1/completions`, `/v1/responses`, `/v1/embeddings`, `/v1/rerank`, `/v1/score`",
            "The `url` of every line",
        ),
        "completion_window": Applied(
            "such as `24h`", "At most `7d`; units are `s`, `m`, `h` and `d`. Then the batch expires"
        ),
        "metadata": Applied("up to 16 pairs of texts", "Shown with the batch"),
        "output_expires_after": Applied(
            "`anchor` (`created_at`), `seconds`", "For how long the files of output and errors are kept"
        ),
    },
)
TABLES = (BATCH,)
