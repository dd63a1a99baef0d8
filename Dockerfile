# One image, four entry points: `headrace pull | gateway | router | worker ...`.
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY protos protos
COPY gateway gateway
COPY router router
COPY worker worker
COPY sim sim
COPY cli cli
RUN python -m venv /opt/headrace \
    && /opt/headrace/bin/pip install --no-cache-dir --constraint constraints.txt ".[convert]"

FROM python:3.11-slim-bookworm
RUN useradd --uid 10001 --create-home headrace && install -d -o headrace -g headrace /models
COPY --from=build /opt/headrace /opt/headrace
ENV PATH=/opt/headrace/bin:$PATH \
    HEADRACE_CACHE=/models \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER headrace
VOLUME /models
ENTRYPOINT ["headrace"]
CMD ["--help"]
