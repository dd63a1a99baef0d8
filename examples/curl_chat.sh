#!/usr/bin/env bash
# Streams an answer with nothing but curl. Usage: curl_chat.sh [BASE_URL] [QUESTION]
set -euo pipefail
base_url=${1:-http://127.0.0.1:8000}
question=${2:-What is the capital of France?}
curl --no-buffer --silent --show-error --fail-with-body "$base_url/v1/chat/completions" \
    -H 'Content-Type: application/json' \
    -d "{\"messages\": [{\"role\": \"user\", \"content\": \"$question\"}], \"model\": \"smollm2-135m\",
         \"temperature\": 0, \"max_tokens\": 64, \"stream\": true}"
